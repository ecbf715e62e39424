"""One line of the benchmark table. Each bench module offers `measure() -> list[Row]`."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    """What was measured, as a user would say it."""
    ours: str
    """Our number with its unit, and what it is the median of."""
    against: str
    """The number it is compared with, measured in the same run."""
    ratio: float | None = None
    target: float | None = None
    """The ratio (or the bare number, when there is nothing to compare with) that we promise."""
    at_least: bool = False
    """True: the target is a floor (speed); False: a ceiling (cost)."""

    @property
    def met(self) -> bool | None:
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def ms(seconds: list[float]) -> str:
    """The median of some durations, for people."""
    return f"{median(seconds) * 1000:.1f} ms (median of {len(seconds)})"
