"""Pauses between tries, without waiting for any."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from itertools import islice
from random import Random

from taskd.runtime.retry import Tries, doubling, every, fixed, rising


def sleep_into(slept: list[float]) -> Callable[[float], Awaitable[None]]:
    async def sleep(pause_s: float) -> None:
        slept.append(pause_s)

    return sleep


def paused(tries: Tries, slept: list[float], leave_after: int = 100) -> list[float]:
    async def main() -> None:
        async for number in tries:
            if number == leave_after:
                return

    asyncio.run(main())
    return slept


def test_first_try_is_made_at_once() -> None:
    slept: list[float] = []
    assert paused(Tries(every(5.0), sleep=sleep_into(slept)), slept, leave_after=1) == []


def test_tries_end_with_the_pauses() -> None:
    slept: list[float] = []
    assert paused(Tries(fixed(1.0, 2.0, 3.0), sleep=sleep_into(slept)), slept) == [1.0, 2.0, 3.0]


def test_number_of_tries_is_limited() -> None:
    slept: list[float] = []
    assert paused(Tries(every(2.0), at_most=3, sleep=sleep_into(slept)), slept) == [2.0, 2.0]


def test_doubling_pauses_have_a_limit_and_jitter() -> None:
    pauses = list(islice(doubling(0.05, 1.0, Random(7))(), 50))
    limits = [min(0.05 * 2**number, 1.0) for number in range(50)]
    assert all(limit / 2 <= pause <= limit for pause, limit in zip(pauses, limits, strict=True))
    assert len(set(pauses)) == 50


def test_rising_pauses_have_a_limit() -> None:
    assert list(islice(rising(1.0, 3.0)(), 5)) == [1.0, 2.0, 3.0, 3.0, 3.0]


def test_reset_starts_with_the_first_pause_again() -> None:
    slept: list[float] = []
    tries = Tries(rising(1.0, 9.0), at_most=5, sleep=sleep_into(slept))

    async def main() -> None:
        async for number in tries:
            if number == 3:
                tries.reset()

    asyncio.run(main())
    assert slept == [1.0, 2.0, 1.0, 2.0]


def test_one_pause_can_be_replaced() -> None:
    slept: list[float] = []
    tries = Tries(rising(1.0, 9.0), at_most=4, sleep=sleep_into(slept))

    async def main() -> None:
        async for number in tries:
            if number == 1:
                tries.pause_next(60.0)

    asyncio.run(main())
    assert slept == [60.0, 1.0, 2.0]


def test_no_pause_begins_after_the_deadline() -> None:
    now, slept = 0.0, list[float]()

    async def sleep(pause_s: float) -> None:
        nonlocal now
        now += pause_s
        slept.append(pause_s)

    assert paused(Tries(every(4.0), deadline=10.0, clock=lambda: now, sleep=sleep), slept) == (
        [4.0, 4.0, 4.0]
    )


def test_stop_event_ends_the_pause_and_the_tries_of_a_thread() -> None:
    stop = threading.Event()
    made = []
    for number in Tries(every(3600.0), stop=stop):
        made.append(number)
        stop.set()
    assert made == [1]


def test_stopped_thread_makes_no_try() -> None:
    stop = threading.Event()
    stop.set()
    assert list(Tries(every(1.0), stop=stop)) == []
