"""When to try again: the pauses between tries, how many there are, and until when.

`async for _ in Tries(doubling(0.05, 1.0, random)):` makes a try at once and one after each pause;
a plain `for` does the same in a thread, where an event can end the pause and with it the tries.
The body of the loop leaves it on success and decides which errors are worth another try.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from itertools import count, repeat
from math import inf
from random import Random

from taskd.runtime.clock import Clock, monotonic

Pauses = Callable[[], Iterator[float]]
"""Gives the pauses in seconds, from the first one. The tries end with the pauses."""


def doubling(first_s: float, limit_s: float, random: Random) -> Pauses:
    """Each pause twice as long as the one before, up to the limit, shortened by up to a half.

    The jitter keeps the processes that have lost the same server from returning all at once.
    """

    def pauses() -> Iterator[float]:
        pause_s = first_s
        while True:
            yield pause_s * random.uniform(0.5, 1.0)
            pause_s = min(2 * pause_s, limit_s)

    return pauses


def rising(first_s: float, limit_s: float) -> Pauses:
    """Each pause longer than the one before by the first, up to the limit."""
    return lambda: (min(first_s * number, limit_s) for number in count(1))


def fixed(*pauses_s: float) -> Pauses:
    return lambda: iter(pauses_s)


def every(pause_s: float) -> Pauses:
    return lambda: repeat(pause_s)


class Tries:
    def __init__(
        self,
        pauses: Pauses,
        *,
        at_most: int | None = None,
        deadline: float = inf,
        stop: threading.Event | None = None,
        clock: Clock = monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """After the deadline no further pause begins. `stop` ends the tries of a thread."""
        self._make_pauses, self._pauses = pauses, pauses()
        self._at_most, self._deadline = at_most, deadline
        self._stop = threading.Event() if stop is None else stop
        self._clock, self._sleep = clock, sleep
        self._made = 0
        self._override_s: float | None = None

    def reset(self) -> None:
        """This try was a success for a while: the next pause is the first one again."""
        self._pauses = self._make_pauses()

    def pause_next(self, pause_s: float) -> None:
        """The next pause lasts this long; the sequence goes on after it."""
        self._override_s = pause_s

    def __aiter__(self) -> Tries:
        return self

    async def __anext__(self) -> int:
        if (pause_s := self._next_pause()) is None:
            raise StopAsyncIteration
        if pause_s > 0.0:
            await self._sleep(pause_s)
        return self._made

    def __iter__(self) -> Tries:
        return self

    def __next__(self) -> int:
        pause_s = self._next_pause()
        if pause_s is None or self._stop.wait(pause_s):
            raise StopIteration
        return self._made

    def _next_pause(self) -> float | None:
        """Count the next try. None: there is none."""
        if self._made == self._at_most:
            return None
        if self._made == 0:
            pause_s: float | None = 0.0
        elif self._clock() >= self._deadline:
            pause_s = None
        elif self._override_s is not None:
            pause_s, self._override_s = self._override_s, None
        else:
            pause_s = next(self._pauses, None)
        self._made += pause_s is not None
        return pause_s
