"""A channel to one listener at a time. A new listener replaces the old one.

Items without a listener are dropped. What must not be lost is kept by the machine, which sends it
again to every new listener.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")

SUBSCRIBED = (("taskd-subscribed", "1"),)
"""Sent first: from here on, the subscriber misses nothing."""


class End(Enum):
    TAKEN_OVER = auto()
    """Another listener has subscribed."""
    TOO_SLOW = auto()
    """Its backlog is full."""
    OVER = auto()
    """The job or the server has ended."""


class Listener(Generic[T]):
    """The backlog of one subscriber."""

    def __init__(self) -> None:
        self._waiting: deque[T] = deque()
        self._end: End | None = None
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    async def next(self, within_s: float) -> T | End | None:
        """The next item, why there will be none, or None if the time is up."""
        if not self._waiting and self._end is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._changed.wait()
            except TimeoutError:
                return None
        # Items from before the end are still delivered, unless another listener gets them now.
        if self._waiting and self._end is not End.TAKEN_OVER:
            return self._waiting.popleft()
        return self._end

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._changed.set()

    def end(self, why: End) -> None:
        self._end = self._end or why
        self._changed.set()


class Channel(Generic[T]):
    def __init__(self, limit: int, on_change: Callable[[], None] = lambda: None) -> None:
        self._limit, self._on_change = limit, on_change
        self._listener: Listener[T] | None = None

    @property
    def connected(self) -> bool:
        return self._listener is not None

    @property
    def full(self) -> bool:
        return self._listener is not None and len(self._listener) >= self._limit

    def open(self) -> Listener[T]:
        if self._listener is not None:
            self._listener.end(End.TAKEN_OVER)
        self._listener = Listener()
        self._on_change()
        return self._listener

    def close(self, listener: Listener[T]) -> bool:
        """Whether this was still the current listener."""
        if self._listener is not listener:
            return False
        self._listener = None
        self._on_change()
        return True

    def put(self, item: T) -> None:
        if self._listener is None:
            return
        if self.full:
            # It will subscribe again and get what still matters; an endless backlog does not help.
            self.end(End.TOO_SLOW)
        else:
            self._listener.put(item)

    def end(self, why: End) -> None:
        if self._listener is not None:
            self._listener.end(why)
            self._listener = None
            self._on_change()
