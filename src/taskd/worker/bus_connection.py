"""The one bus connection of a training process, and its subscribers.

A process has one position on the bus, so it may have one connection. In-process recovery brings its
own (`manager_connection.py`). Without it, the first subscriber opens a plain connection here. When
a manager connection opens later, it takes over, and the subscribers move to it unchanged.
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

Send = Callable[[Body], None]
"""Sends a message to the manager, from any thread, without waiting."""


class Subscriber(Protocol):
    """Called on the connection's thread; must return at once."""

    def joined(self, send: Send) -> None: ...

    def received(self, body: Body) -> None: ...


class PlainConnection:
    """Sends messages to the manager, and passes on received ones to the subscribers."""

    def __init__(self, config: BusConfig) -> None:
        self._config = config
        self._outbox: asyncio.Queue[Body] = asyncio.Queue()
        self._thread = LoopThread("taskd-bus")
        self._task = self._thread.run(self._guarded())

    def send(self, body: Body) -> None:
        try:
            self._thread.run(self._put(body))
        except Permanent as error:
            log.debug("%s is not sent: %s", type(body).__name__, error)

    def close(self) -> None:
        self._task.cancel()
        self._thread.stop()

    async def _put(self, body: Body) -> None:
        self._outbox.put_nowait(body)

    async def _guarded(self) -> None:
        """An error here ends the connection, never the training."""
        try:
            await self._run()
        except Exception:
            log.exception("the connection to the manager has failed; training continues without it")

    async def _run(self) -> None:
        bus = Bus(self._config)
        await bus.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_all(bus))
                tasks.create_task(self._send_all(bus))
                async for change in bus.changes():
                    if isinstance(change, Joined):
                        publish_joined(self.send)
        finally:
            await bus.close()

    async def _receive_all(self, bus: Bus) -> None:
        while True:
            publish((await bus.receive_order()).body)

    async def _send_all(self, bus: Bus) -> None:
        while True:
            body = await self._outbox.get()
            if not await bus.send(manager(), body):
                log.info("%s was not delivered: %s", type(body).__name__, bus.disconnect_reason)


_lock = threading.Lock()
_subscribers: list[Subscriber] = []
_plain: PlainConnection | None = None
_manager_send: Send | None = None


def take_over(send: Send) -> None:
    """Use a manager connection that is about to open. Closes the plain connection first."""
    global _plain, _manager_send
    with _lock:
        _manager_send, plain, _plain = send, _plain, None
    if plain is not None:
        plain.close()


def subscribe(subscriber: Subscriber, config: BusConfig) -> None:
    """Pass received messages to the subscriber from now on. Subscribing twice changes nothing."""
    global _plain
    with _lock:
        if subscriber in _subscribers:
            return
        _subscribers.append(subscriber)
        send = _manager_send
        if send is None and _plain is None:
            _plain = PlainConnection(config)
            return
    if send is not None:
        subscriber.joined(send)


def unsubscribe(subscriber: Subscriber) -> None:
    """The last one closes the plain connection. A manager connection stays open."""
    global _plain
    plain = None
    with _lock:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)
        if not _subscribers:
            plain, _plain = _plain, None
    if plain is not None:
        plain.close()


def has_subscriber(kind: type) -> bool:
    return any(isinstance(subscriber, kind) for subscriber in tuple(_subscribers))


def publish_joined(send: Send) -> None:
    for subscriber in tuple(_subscribers):
        subscriber.joined(send)


def publish(body: Body) -> None:
    for subscriber in tuple(_subscribers):
        subscriber.received(body)
