"""Where a rank's time goes, step by step: waiting for others, for data, for the disk, or its own.

The hooks of a framework (`torch/hooks.py`) tell what happens; `recorder.py` publishes the sums;
`core/stragglers.py` compares them between ranks. Times are nanoseconds of one clock.

A wait counts when there was nothing else to do: the whole of every blocking wait that is seen, and
the *tail* of the step's collectives, from the last one's launch to the last end. Collectives that
run beside the backward pass cost nothing, so only their tail counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

S = 1e-9


@dataclass(slots=True)
class Turn:
    """One step. A collective may end after its step has, in another thread; it keeps its turn."""

    launched: int = 0
    ended: int = 0
    waited: int = 0
    wait_ended: int = 0
    data: int = 0
    save: int = 0
    collectives: int = 0
    began: int = 0
    took: int = 0

    def launch(self, now: int) -> None:
        self.launched = now
        self.collectives += 1

    def end(self, now: int) -> None:
        self.ended = max(self.ended, now)

    def wait(self, start: int, end: int) -> None:
        self.waited += end - start
        self.wait_ended = max(self.wait_ended, end)

    @property
    def tail(self) -> int:
        return max(0, self.ended - max(self.launched, self.wait_ended)) if self.launched else 0


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
        sums.wait_s += min(turn.waited + turn.tail, turn.took) * S
        sums.data_s += turn.data * S
        sums.save_s += turn.save * S
        sums.collectives += turn.collectives
