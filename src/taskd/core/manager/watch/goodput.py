"""Goodput: the share of its time that a job spends in committed steps.

A step counts once it is committed, because no fault can undo it then. Time in which no rank
commits a step (start, repair, pause for an operation) is lost time. A step that takes longer than
usual counts as work; of an interval that contains a pause only the usual step time counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

WINDOW = 64
ENOUGH = 4
PAUSE = 5.0
"""An interval this many times longer than the usual step contains a pause."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Sums and recent step times, updated with each heartbeat."""

    began: float
    productive_s: float = 0.0
    steps: int = 0
    last_step: int | None = None
    last_at: float = 0.0
    paces: tuple[float, ...] = ()

    def at(self, step: int, now: float) -> Goodput:
        """Update with the job's highest committed step at this time."""
        if self.last_step is None:
            return replace(self, last_step=step, last_at=now)
        count = step - self.last_step
        if count <= 0:
            return self
        if self.last_step == 0:
            # The first step includes the start of the job: its duration says nothing.
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
        elapsed = now - self.began
        return min(1.0, self.productive_s / elapsed) if elapsed > 0 else 0.0

    @property
    def steps_per_s(self) -> float:
        usual = median(self.paces) if self.paces else 0.0
        return 1.0 / usual if usual > 0 else 0.0
