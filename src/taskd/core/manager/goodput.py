"""How much of its time a job spends in steps that count.

A step counts once it is committed: it is then lost to no fault. Time in which no rank commits
anything (starting, waiting for a repair, paused for an operation) is time lost. A step that takes
longer than usual is still work, but of a span with a pause in it only the usual step counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

WINDOW = 64
ENOUGH = 4
PAUSE = 5.0
"""A span this many times longer than the usual step has a pause in it."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Sums, and the last spans; fed with what the heartbeats say."""

    began: float
    productive_s: float = 0.0
    steps: int = 0
    last_step: int | None = None
    last_at: float = 0.0
    paces: tuple[float, ...] = ()

    def at(self, step: int, now: float) -> Goodput:
        """The job's highest committed step, as known at this moment."""
        if self.last_step is None:
            return replace(self, last_step=step, last_at=now)
        count = step - self.last_step
        if count <= 0:
            return self
        if self.last_step == 0:
            # The first step contains the start, so what it took says nothing.
            return replace(self, steps=self.steps + count, last_step=step, last_at=now)
        pace = (now - self.last_at) / count
        usual = median(self.paces) if self.paces else pace
        paused = len(self.paces) >= ENOUGH and pace > PAUSE * usual
        return replace(
            self,
            productive_s=self.productive_s + count * (usual if paused else pace),
            steps=self.steps + count,
            last_step=step,
            last_at=now,
            paces=self.paces if paused else (*self.paces, pace)[-WINDOW:],
        )

    def share(self, now: float) -> float:
        lived = now - self.began
        return min(1.0, self.productive_s / lived) if lived > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        usual = median(self.paces) if self.paces else 0.0
        return 1.0 / usual if usual > 0 else 0.0
