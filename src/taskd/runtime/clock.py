"""The only module that reads the clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

T = TypeVar("T")
Clock = Callable[[], float]
monotonic: Clock = time.monotonic
wall: Clock = time.time
monotonic_ns: Callable[[], int] = time.monotonic_ns
wall_ns: Callable[[], int] = time.time_ns
CLOCK_REALTIME_COARSE = 5
"""Linux's constant; Python has no name for it."""


def file_time() -> float:
    """The clock of file timestamps, which is some milliseconds behind `wall`."""
    return time.clock_gettime(CLOCK_REALTIME_COARSE)


async def next_before(inbox: asyncio.Queue[T], deadline: float, clock: Clock) -> T | None:
    """The next item, or None when the deadline has passed."""
    if not inbox.empty():
        return inbox.get_nowait()
    if deadline == inf:
        return await inbox.get()
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())):
            return await inbox.get()
    except TimeoutError:
        return None


async def wait_until(happened: asyncio.Event, at_most_s: float) -> bool:
    """Wait for the event. False: timeout."""
    try:
        async with asyncio.timeout(at_most_s):
            return await happened.wait()
    except TimeoutError:
        return False
