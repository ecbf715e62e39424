"""Streams that send the newest state: a slow reader misses steps in between, never the last one.

Clients register first. One stream per client: a new one replaces the old one.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, NoReturn, TypeVar

import grpc

from taskd.clusterd.listeners import SUBSCRIBED
from taskd.runtime.clock import wait_until

K = TypeVar("K", bound=Hashable)

MAX_REGISTERED = 10_000
PAUSE_S = 0.2
"""Between two looks of one subscriber: at most five per second."""
QUIET_S = 5.0
"""A look without any news, in case that time alone has changed something."""


class LevelStreams(Generic[K]):
    def __init__(self) -> None:
        self._over: OrderedDict[K, asyncio.Event | None] = OrderedDict()
        """Of each registered client, if it has subscribed: setting the event ends its stream."""
        self._news: set[asyncio.Event] = set()
        self._closed = False

    def __contains__(self, client: K) -> bool:
        return client in self._over

    def wake(self) -> None:
        for news in self._news:
            news.set()

    def close(self) -> None:
        self._closed = True
        self.wake()

    def register(self, client: K) -> bool:
        """Ends its stream, if it has one. False: too many clients have subscribed."""
        if client not in self._over and len(self._over) >= MAX_REGISTERED:
            waiting = next((one for one, over in self._over.items() if over is None), None)
            if waiting is None:
                return False
            del self._over[waiting]
        self._replace(client, None)
        return True

    async def serve(self, client: K, context: Any, look: Callable[[], Iterable[Any]]) -> None:
        """Send what `look` finds new, now and whenever something may have changed."""
        if client not in self._over:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, "register first")
        over, news = asyncio.Event(), asyncio.Event()
        self._replace(client, over)
        self._news.add(news)
        try:
            await context.send_initial_metadata(SUBSCRIBED)
            while True:
                news.clear()
                for message in look():
                    await context.write(message)
                await wait_until(news, QUIET_S)
                if self._closed:
                    await abort(context, grpc.StatusCode.UNAVAILABLE, "the server shuts down")
                if await wait_until(over, PAUSE_S):
                    await abort(context, grpc.StatusCode.ABORTED, "another client has subscribed")
        finally:
            self._news.discard(news)
            if self._over.get(client) is over:
                del self._over[client]

    def _replace(self, client: K, over: asyncio.Event | None) -> None:
        before = self._over.pop(client, None)
        self._over[client] = over
        if before is not None:
            before.set()
            self.wake()


async def abort(context: Any, code: grpc.StatusCode, why: str) -> NoReturn:
    await context.abort(code, why)
    raise AssertionError("abort does not return")
