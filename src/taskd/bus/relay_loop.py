"""A relay in an asyncio loop: its answers become results, its clock ticks, its links wake.

Whoever calls the relay (`bus`, `uplink`, `downlinks`, `link`) calls `settle` right after it, with
no await in between, so the relay is never seen half changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from itertools import count
from math import inf
from weakref import WeakSet

from taskd.core.bus.relay import Answer, Relay
from taskd.core.bus.routing import Hop
from taskd.errors import Permanent
from taskd.model.bus import Change, Joined, PeerJoined, Received
from taskd.model.codes import NetCode
from taskd.model.ids import Position
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

TELL_LOST_EVERY_S = 10.0
"""Messages that nobody waits for are lost quietly; the log counts them this often."""
MAX_CHANGES = 65_536
"""Changes that a slow watcher has not fetched. The oldest are dropped."""


class Switch:
    def __init__(self, relay: Relay[Received], life: str) -> None:
        """`life` names this process, so that the names it gives are its own."""
        self.relay = relay
        self.life = life
        self._names = count(1)
        self._tickets = count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._wakes: dict[Hop, asyncio.Event] = {}
        self._moved = asyncio.Event()
        self._progressed = asyncio.Event()
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._told_lost = 0
        self._tell_lost_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.joins = 0
        """How often the way up has been opened."""

    def ticket(self) -> tuple[int, asyncio.Future[Answer]]:
        """A number to ask the relay with, and where its answer will be."""
        number = next(self._tickets)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        return number, answer

    def new_uuid(self) -> str:
        return f"{self.life}-{next(self._names)}"

    def wake_for(self, hop: Hop) -> asyncio.Event:
        """The event that tells a link's writer of something to write. One writer a hop."""
        event = asyncio.Event()
        self._wakes[hop] = event
        return event

    def settle(self) -> None:
        """Hand out what the last call has left in the relay."""
        relay = self.relay
        for answer in relay.answers:
            asked = self._asked.pop(answer.ticket, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        relay.answers.clear()
        for change in relay.changes:
            self.joins += isinstance(change, Joined)
            for watcher in self._watchers:
                watcher.tell(change)
        relay.changes.clear()
        for hop in relay.ready:
            wake = self._wakes.get(hop)
            if wake is not None:
                wake.set()
        relay.ready.clear()
        if relay.inbox:
            self._moved.set()
        if relay.lost > self._told_lost:
            self._tell_lost()
        self._arm()

    def _tell_lost(self) -> None:
        now = monotonic()
        if now >= self._tell_lost_at:
            self._tell_lost_at = now + TELL_LOST_EVERY_S
            count, self._told_lost = self.relay.lost - self._told_lost, self.relay.lost
            log.warning("%s lost %d messages: %s", self.relay.me, count, self.relay.because)

    def _arm(self) -> None:
        deadline = self.relay.deadline
        if self._timer is not None and self._timer.when() <= deadline:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline != inf and not self._closed:
            # The loop's clock is the monotonic one, so deadlines of both are the same.
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.relay.tick(monotonic())
        self.settle()

    def progressed(self) -> None:
        """A link has moved on, so that its window may have room again."""
        self._progressed.set()

    async def progress(self, deadline: float) -> bool:
        """Wait until a link has moved on. False when the deadline comes first."""
        self._progressed.clear()
        try:
            async with asyncio.timeout_at(deadline):
                await self._progressed.wait()
        except TimeoutError:
            return False
        return True

    async def receive(self) -> Received:
        while not self.relay.inbox:
            if self._closed:
                raise Permanent(f"the bus of {self.relay.me} is closed")
            self._moved.clear()
            await self._moved.wait()
        return self.relay.fetch()

    def watch(self) -> Watcher:
        """From now on; it begins with what is true now."""
        watcher = Watcher(self._watchers)
        for hop, lane in self.relay.lanes.items():
            if lane.connected and isinstance(hop, Position):
                watcher.tell(PeerJoined(self.relay.named(hop)))
            elif lane.connected:
                watcher.tell(Joined())
        return watcher

    async def flush(self, deadline: float) -> None:
        """Wait until every open link has delivered what it holds."""
        while any(lane.connected and not lane.is_idle for lane in self.relay.lanes.values()):
            if not await self.progress(deadline):
                return

    def close(self) -> None:
        """Whoever still waits for a result or a message is told that there will be none."""
        self._closed = True
        self._moved.set()
        if self._timer is not None:
            self._timer.cancel()
        for watcher in list(self._watchers):
            watcher.end()
        for ticket, asked in self._asked.items():
            if not asked.done():
                asked.set_result(Answer(ticket, NetCode.ServerErr, self.relay.me))
        self._asked.clear()


class Watcher(AsyncIterator[Change]):
    """What has changed, in its order, for one reader. It ends when the bus closes."""

    def __init__(self, among: WeakSet[Watcher]) -> None:
        self._changes: deque[Change] = deque(maxlen=MAX_CHANGES)
        self._moved = asyncio.Event()
        self._ended = False
        self._among = among
        among.add(self)

    def tell(self, change: Change) -> None:
        self._changes.append(change)
        self._moved.set()

    def end(self) -> None:
        self._ended = True
        self._among.discard(self)
        self._moved.set()

    async def __anext__(self) -> Change:
        while not self._changes:
            if self._ended:
                raise StopAsyncIteration
            self._moved.clear()
            await self._moved.wait()
        return self._changes.popleft()
