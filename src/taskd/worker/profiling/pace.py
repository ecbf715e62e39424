"""Where a rank's time goes, step by step: waiting for others, for data, for the disk, or its own.

The hooks of a framework (`torch/profiling/step_recorder.py`) tell what happens; `recorder.py`
publishes the sums; `core/manager/stragglers.py` compares them between ranks. Times are
nanoseconds of one clock.

A wait counts when there was nothing else to do: every blocking wait that is seen, and the *tail* of
the collectives that run beside the backward pass, from the last one's launch to the last end. Up to
that launch they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

S = 1e-9


@dataclass(slots=True)
class Turn:
    """One step. A collective may end after its step has, in another thread; it keeps its turn."""

    launched: int = 0
    """The last collective that nobody waits for yet, and the last end of such a one."""
    ended: int = 0
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
        """What several waits have in common counts once."""
        total = covered = 0
        tail = [(self.launched, self.ended)] if self.launched else []
        for start, end in sorted(self.waits + tail):
            total += max(0, end - max(start, covered))
            covered = max(covered, end)
        return total


@dataclass(slots=True)
class Sums:
    steps: int = 0
    total_s: float = 0.0
    wait_s: float = 0.0
    data_s: float = 0.0
    save_s: float = 0.0
    collectives: int = 0


@dataclass(slots=True)
class Stopwatch:
    """The training thread's. Only whole steps count: the one in which it was started does not."""

    sums: Sums = field(default_factory=Sums)
    turn: Turn = field(default_factory=Turn)
    _last: Turn | None = None
    """Ends of its collectives may still be told while the next step has begun."""

    def stepped(self, now: int) -> None:
        if self._last is not None:
            self._settle(self._last)
        turn, self.turn = self.turn, Turn(began=now)
        turn.took = now - turn.began
        self._last = turn if turn.began else None

    def _settle(self, turn: Turn) -> None:
        sums = self.sums
        sums.steps += 1
        sums.total_s += turn.took * S
        sums.wait_s += min(turn.waited, turn.took) * S
        sums.data_s += turn.data * S
        sums.save_s += turn.save * S
        sums.collectives += turn.collectives
