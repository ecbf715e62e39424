"""The one bus connection of a training process, and who rides on it.

A process has one place on the bus, so it may hold one connection. In-process recovery brings its
own (`link.py`); where there is none, the first rider opens a bare one here. A link that comes later
takes the place over, and the riders move to it without noticing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from taskd.bus.endpoint import Bus, BusConfig, Joined
from taskd.errors import Permanent
from taskd.model.ids import manager
from taskd.model.messages import Body
from taskd.runtime.loop_thread import LoopThread

log = logging.getLogger(__name__)

CLOSE_S = 5.0

Say = Callable[[Body], None]
"""Sends a message to the manager, from any thread, without waiting."""


class Rider(Protocol):
    """Called on the connection's thread; must return at once."""

    def joined(self, say: Say) -> None: ...

    def heard(self, body: Body) -> None: ...


class Line:
    """A bare connection: hears, says, and knows nothing."""

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        self._outbox: asyncio.Queue[Body] = asyncio.Queue()
        self._thread = LoopThread("taskd-line")
        self._living = self._thread.run(self._guarded())

    def say(self, body: Body) -> None:
        try:
            self._thread.run(self._put(body))
        except Permanent as error:
            log.debug("%s is not said: %s", type(body).__name__, error)

    def close(self) -> None:
        self._living.cancel()
        self._thread.stop()

    async def _put(self, body: Body) -> None:
        self._outbox.put_nowait(body)

    async def _guarded(self) -> None:
        """We must never be what kills training."""
        try:
            await self._live()
        except Exception:
            log.exception("the line to the manager is given up; training goes on without it")

    async def _live(self) -> None:
        bus = Bus(self._config)
        await bus.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._hear(bus))
                tasks.create_task(self._speak(bus))
                async for change in bus.changes():
                    if isinstance(change, Joined):
                        joined(self.say)
        finally:
            await bus.close()

    async def _hear(self, bus: Bus) -> None:
        while True:
            heard((await bus.receive()).body)

    async def _speak(self, bus: Bus) -> None:
        while True:
            body = await self._outbox.get()
            if not await bus.send(manager(), body):
                log.info("%s was not delivered: %s", type(body).__name__, bus.trouble)


_lock = threading.Lock()
_riders: list[Rider] = []
_own: Line | None = None
_link: Say | None = None


def take_over(say: Say) -> None:
    """A link of in-process recovery is about to open. Returns once the place is free for it."""
    global _own, _link
    with _lock:
        _link, own, _own = say, _own, None
    if own is not None:
        own.close()


def board(rider: Rider, config: BusConfig) -> None:
    """From now on the rider is told what is heard. A second boarding changes nothing."""
    global _own
    with _lock:
        if rider in _riders:
            return
        _riders.append(rider)
        link = _link
        if link is None and _own is None:
            _own = Line(config)
            return
    if link is not None:
        rider.joined(link)


def leave(rider: Rider) -> None:
    """The last one out closes the door, unless it is the link's."""
    global _own
    own = None
    with _lock:
        if rider in _riders:
            _riders.remove(rider)
        if not _riders:
            own, _own = _own, None
    if own is not None:
        own.close()


def carries(kind: type) -> bool:
    """Whether a rider of this kind is on board."""
    return any(isinstance(rider, kind) for rider in tuple(_riders))


def joined(say: Say) -> None:
    for rider in tuple(_riders):
        rider.joined(say)


def heard(body: Body) -> None:
    for rider in tuple(_riders):
        rider.heard(body)
