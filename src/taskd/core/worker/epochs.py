"""Which batch belongs to a step: the epoch, and the number of the batch in it.

Steps are numbered through all epochs. Every epoch has the same number of batches where the loader
knows its length. Otherwise the end of an epoch is known only when a rank has reached it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the data."""

    epoch: int
    index: int
    """The number of the batch in its epoch."""


@dataclass(frozen=True, slots=True)
class Epochs:
    """The epochs of a job, as far as they are known."""

    count: int | None
    """How many epochs there are. None: no limit."""
    length: int | None
    """How many batches each epoch has. None: not known."""
    ends: tuple[int, ...] = ()
    """Where `length` is not known: the step after the last one of each epoch that has ended."""

    def locate(self, step: int) -> Position | None:
        """The place of this step's batch. None: the epochs end before it."""
        if self.length is not None:
            place = Position(*divmod(step, self.length))
        else:
            epoch = bisect_right(self.ends, step)
            place = Position(epoch, step - self.start(epoch))
        return place if self.count is None or place.epoch < self.count else None

    def start(self, epoch: int) -> int:
        """The first step of this epoch, which must be known."""
        if self.length is not None:
            return epoch * self.length
        return self.ends[epoch - 1] if epoch else 0

    def end(self, epoch: int) -> int | None:
        """The step after the last one of this epoch. None: not known yet."""
        if self.length is not None:
            return (epoch + 1) * self.length
        return self.ends[epoch] if epoch < len(self.ends) else None

    def ended(self, epoch: int, batches: int) -> Epochs:
        """The same, with the end of an epoch, which has this many batches."""
        assert self.length is None
        assert epoch == len(self.ends)
        return replace(self, ends=(*self.ends, self.start(epoch) + batches))
