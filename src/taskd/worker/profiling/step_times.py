"""How long each part of a rank's steps took: waiting for other ranks, for data, for checkpoints.

The hooks of a framework (`torch/profiling/step_recorder.py`) add the times; `recorder.py` publishes
the totals; `stragglers.py` compares them between ranks. All times are nanoseconds of
the same clock.

Waiting counts only while the rank had nothing else to do: every blocking wait that a hook sees, and
the *tail* of the collectives that run beside the backward pass, from the launch of the last one to
the end of the last one. Until that launch they cost no time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SECONDS = 1e-9


@dataclass(slots=True)
class StepTimes:
    """One step. A collective may end in another thread after its step; it still counts here."""

    launched: int = 0
    """Launch of the last collective that no thread waits for yet."""
    ended: int = 0
    """The last end of such a collective."""
    waits: list[tuple[int, int]] = field(default_factory=list)
    data: int = 0
    save: int = 0
    collectives: int = 0
    began: int = 0
    took: int = 0

    def launch(self, now: int) -> None:
        self.launched = now

    def end(self, now: int) -> None:
        self.ended = max(self.ended, now)

    def wait(self, start: int, end: int) -> None:
        self.waits.append((start, end))

    @property
    def waited(self) -> int:
        """The total of all waits. Overlapping parts count once."""
        total = covered = 0
        tail = [(self.launched, self.ended)] if self.launched else []
        for start, end in sorted(self.waits + tail):
            total += max(0, end - max(start, covered))
            covered = max(covered, end)
        return total


@dataclass(slots=True)
class StepTotals:
    steps: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    save_s: float = 0.0
    collectives: int = 0


@dataclass(slots=True)
class StepTimer:
    """Adds up the steps of the training thread. The incomplete step at its start does not count."""

    totals: StepTotals = field(default_factory=StepTotals)
    current: StepTimes = field(default_factory=StepTimes)
    _last: StepTimes | None = None
    """The previous step: its collectives may still end while the next step runs."""

    def step_ended(self, now: int) -> None:
        if self._last is not None:
            self._add(self._last)
        step, self.current = self.current, StepTimes(began=now)
        step.took = now - step.began
        self._last = step if step.began else None

    def _add(self, step: StepTimes) -> None:
        totals = self.totals
        totals.steps += 1
        totals.total_s += step.took * SECONDS
        totals.wait_s += min(step.waited, step.took) * SECONDS
        totals.data_s += step.data * SECONDS
        totals.save_s += step.save * SECONDS
        totals.collectives += step.collectives
