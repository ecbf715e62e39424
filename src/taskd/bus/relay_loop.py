"""Runs a relay in an asyncio loop: answers become results, deadlines become timers, links wake.

A relay leaves what it has decided in itself, to be handed out after each call. So the relay is
reachable only by `with relay_loop.relay() as relay:`, which hands everything out at its end. There
must be no await inside: no other task may see the relay half changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from math import inf
from weakref import WeakSet

from taskd.core.bus.delivery import Link
from taskd.core.bus.relay import Answer, Relay
from taskd.core.bus.routing import Hop, Routes
from taskd.errors import Permanent
from taskd.model.bus import Change, Joined, PeerJoined, Received
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

LOG_LOST_EVERY_S = 10.0
"""Interval of the log lines that count lost messages whose sender does not wait for a result."""
MAX_CHANGES = 65_536
"""Changes that a slow watcher has not read. The oldest are dropped."""


class RelayUse:
    """`with` gives the relay and hands out its results at the end, also after an exception."""

    def __init__(self, relay_loop: RelayLoop) -> None:
        self._relay_loop = relay_loop
        self._in_use = False

    def __enter__(self) -> Relay[Received]:
        if self._in_use:
            raise AssertionError("the relay is in use: there was an await inside `with relay()`")
        self._in_use = True
        return self._relay_loop._relay

    def __exit__(self, *_: object) -> None:
        self._in_use = False
        self._relay_loop._settle()


class RelayLoop:
    def __init__(self, relay: Relay[Received], incarnation: str) -> None:
        """`incarnation` names this process, so that the message ids it makes are unique."""
        self._relay = relay
        self._relay_use = RelayUse(self)
        self.incarnation = incarnation
        self._message_numbers = count(1)
        self._tickets = count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._wakes: dict[Hop, asyncio.Event] = {}
        self._inbox_filled = asyncio.Event()
        self._progressed = asyncio.Event()
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._logged_lost = 0
        self._log_lost_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.joins = 0
        """How often the upstream connection has been opened."""

    # The relay

    def relay(self) -> RelayUse:
        """`with relay_loop.relay() as relay:` to change it."""
        return self._relay_use

    @property
    def me(self) -> Position:
        return self._relay.me

    @property
    def routes(self) -> Routes:
        """To be read only."""
        return self._relay.routes

    def link(self, hop: Hop) -> Link | None:
        return self._relay.links.get(hop)

    def _settle(self) -> None:
        relay = self._relay
        for answer in relay.answers:
            asked = self._asked.pop(answer.ticket, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        relay.answers.clear()
        for change in relay.changes:
            self.joins += isinstance(change, Joined)
            for watcher in self._watchers:
                watcher.add(change)
        relay.changes.clear()
        for hop in relay.ready:
            wake = self._wakes.get(hop)
            if wake is not None:
                wake.set()
        relay.ready.clear()
        if relay.inbox:
            self._inbox_filled.set()
        if relay.lost > self._logged_lost:
            self._log_lost()
        self._set_timer()

    def _log_lost(self) -> None:
        now, relay = monotonic(), self._relay
        if now >= self._log_lost_at:
            self._log_lost_at = now + LOG_LOST_EVERY_S
            lost, self._logged_lost = relay.lost - self._logged_lost, relay.lost
            log.warning("%s lost messages: count=%d, last: %s", relay.me, lost, relay.because)

    def _set_timer(self) -> None:
        deadline = self._relay.deadline
        if self._timer is not None and self._timer.when() <= deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline != inf and not self._closed:
            # asyncio's clock is the monotonic one, so the relay's deadlines fit.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        with self.relay() as relay:
            relay.tick(monotonic())

    # Its users

    def ticket(self) -> tuple[int, asyncio.Future[Answer]]:
        """A number to give to the relay with a message, and the future of its answer."""
        number = next(self._tickets)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        return number, answer

    def new_uuid(self) -> str:
        return f"{self.incarnation}-{next(self._message_numbers)}"

    def wake_for(self, hop: Hop) -> asyncio.Event:
        """The event that wakes the writer of a link. Each link has one writer."""
        event = asyncio.Event()
        self._wakes[hop] = event
        return event

    def progressed(self) -> None:
        """A link has delivered something, so its window may have room again."""
        self._progressed.set()

    async def progress(self, deadline: float) -> bool:
        """Wait until a link has delivered something. False: the deadline came first."""
        self._progressed.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._progressed.wait()
        except TimeoutError:
            return False
        return True

    async def receive(self) -> Received:
        while not self._relay.inbox:
            if self._closed:
                raise Permanent(f"the bus of {self.me} is closed")
            self._inbox_filled.clear()
            await self._inbox_filled.wait()
        return self._relay.fetch()

    def watch(self) -> Watcher:
        """Changes from now on, after one change for each link that is open now."""
        watcher = Watcher(self._watchers)
        for hop, link in self._relay.links.items():
            if link.connected and isinstance(hop, Position):
                watcher.add(PeerJoined(self._relay.position_of(hop)))
            elif link.connected:
                watcher.add(Joined())
        return watcher

    async def flush(self, deadline: float) -> None:
        """Wait until every open link has delivered what it holds."""
        while any(link.connected and not link.is_idle for link in self._relay.links.values()):
            if not await self.progress(deadline):
                return

    def close(self) -> None:
        """End all waits for a result or a message: there will be none."""
        self._closed = True
        self._inbox_filled.set()
        if self._timer is not None:
            self._timer.cancel()
        for watcher in list(self._watchers):
            watcher.end()
        for ticket, asked in self._asked.items():
            if not asked.done():
                asked.set_result(Answer(ticket, NetCode.ServerErr, self.me))
        self._asked.clear()


class Watcher(AsyncIterator[Change]):
    """The changes in their order, for one reader. Ends when the bus closes."""

    def __init__(self, among: WeakSet[Watcher]) -> None:
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._woken = asyncio.Event()
        self._ended = False
        self._among = among
        among.add(self)

    def add(self, change: Change) -> None:
        self._changes.append(change)
        self._woken.set()

    def end(self) -> None:
        self._ended = True
        self._among.discard(self)
        self._woken.set()

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._ended:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()
        return self._changes.popleft()
