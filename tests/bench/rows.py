"""One row of a benchmark table. Each benchmark module has `measure() -> list[Row]`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    """What was measured, in the words of a user."""
    ours: str
    """Our number with its unit, and how many measurements it is the median of."""
    against: str
    """The number it is compared with, measured in the same run."""
    ratio: float | None = None
    target: float | None = None
    """The ratio that we promise, or the number itself if there is nothing to compare with."""
    at_least: bool = False
    """True: the target is a minimum (speed); False: a maximum (cost)."""

    @property
    def met(self) -> bool | None:
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def ms(seconds: list[float]) -> str:
    """Format the median of some durations."""
    return f"{median(seconds) * 1000:.1f} ms (median of {len(seconds)})"
