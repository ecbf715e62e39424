"""Token buckets: how often something may happen, for each of many keys."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from taskd.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Rate:
    per_second: float
    burst: float


class Buckets:
    """Token buckets by key. The least recently used one is dropped, which grants one burst."""

    def __init__(self, rate: Rate, keys: int, clock: Clock) -> None:
        self._rate, self._keys, self._clock = rate, keys, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Whether another call is within the rate. A costly call may leave a negative balance."""
        now = self._clock()
        left, since = self._left.pop(key, (self._rate.burst, now))
        left = min(self._rate.burst, left + (now - since) * self._rate.per_second)
        allowed = left >= 1.0
        self._left[key] = (left - cost if allowed else left, now)
        if len(self._left) > self._keys:
            self._left.popitem(last=False)
        return allowed
