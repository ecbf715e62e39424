"""What copies cost: how long steps take with and without one, and how long training waits for it.

`copy_schedule.py` reports every step; `core/worker/copy_interval.py` chooses the interval.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from taskd.runtime.clock import Clock, monotonic

KEPT, FEWEST = 9, 3
"""The interval follows from the median of the last steps of each kind, if there are enough."""


class CopyCosts:
    """The last steps of one rank."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._with: deque[float] = deque(maxlen=KEPT)
        self._without: deque[float] = deque(maxlen=KEPT)
        self._waits: deque[float] = deque(maxlen=KEPT)
        self._began: float | None = None
        self._waited = 0.0
        self._has_copy = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The training thread is kept by a copy."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    def stepped(self, copies: bool) -> None:
        """A step has ended. `copies`: its state is copied during the next one."""
        now = self._clock()
        if self._began is not None:
            took = now - self._began
            (self._with if self._has_copy else self._without).append(took)
            if self._has_copy:
                self._waits.append(self._waited)
        self._began, self._waited, self._has_copy = now, 0.0, copies

    def forget(self) -> None:
        """Something else has happened between two steps."""
        self._began = None

    def measured(self) -> tuple[float, float] | None:
        """How long a step takes without copies, and what one adds to it. None: not known yet."""
        if len(self._with) < FEWEST:
            return None
        waits = median(self._waits)
        longer = median(self._with)
        if len(self._without) < FEWEST:
            return max(0.0, longer - waits), waits
        step = median(self._without)
        # Copies also slow down what runs beside them.
        return step, max(waits, longer - step)
