"""How much one caller may ask for: a bucket of tokens each, so that a flood drowns only itself."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from taskd.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class Rate:
    a_second: float
    burst: float


class Buckets:
    """By key. The longest unused is forgotten, and with it at most one burst."""

    def __init__(self, rate: Rate, keys: int, clock: Clock) -> None:
        self._rate, self._keys, self._clock = rate, keys, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Whether one more call is within the rate. A costly one may leave a debt."""
        now = self._clock()
        left, since = self._left.pop(key, (self._rate.burst, now))
        left = min(self._rate.burst, left + (now - since) * self._rate.a_second)
        allowed = left >= 1.0
        self._left[key] = (left - cost if allowed else left, now)
        if len(self._left) > self._keys:
            self._left.popitem(last=False)
        return allowed
