"""The steps of a job, for a training loop that belongs to a framework.

In a script an attempt is a `with` block. A framework's loop can only be hooked: one hook is called
where a step begins, another one where it ends. This class keeps the attempt in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from taskd.torch.context import JobContext
from taskd.torch.data.batch_feed import Feed
from taskd.torch.loop.section import Section
from taskd.torch.step import Step
from taskd.torch.step_cycle import StepCycle

T = TypeVar("T")


class Repeat(BaseException):
    """Leaves the framework's loop: the attempt was abandoned, and the step is to be repeated."""


class FrameworkLoop:
    """One per training. `Job.framework_loop` creates it."""

    def __init__(
        self,
        steps: Iterator[Step],
        total: Callable[[], int],
        start: int,
        cycle: StepCycle,
        context: JobContext,
        feed: Feed | None,
        new_section: Callable[[str], Section],
    ) -> None:
        """A replacement has joined the other ranks when it returns.

        `feed` is None where the framework keeps the batches of a step by itself.
        """
        self._steps, self._total, self._cycle, self._context = steps, total, cycle, context
        self._feed, self._new_section = feed, new_section
        self._is_open = False
        self.step: Step | None = None
        """The present step. None: all steps are done."""
        self.is_pending = False
        """The present step is committed, and the code after it has not run in this process."""
        self.begin_turn()
        self.has_joined_late = self.step is None or context.step > start
        """This process has joined a job that has committed a step already."""
        self.is_pending = self.step is not None and self._context.step > self.step

    @property
    def is_open(self) -> bool:
        """Whether an attempt has begun and not ended."""
        return self._is_open

    def begin_turn(self) -> None:
        """The code after the last step is done."""
        self.step = next(self._steps, None)
        self.is_pending = False

    def record_turn(self) -> None:
        """What the framework has done since `begin_turn` belongs to the state before the step."""
        comparison = self._context.comparison
        if comparison is not None and self.step is not None:
            comparison.begin_turn(self.step)

    def begin_attempt(self, batches: Sequence[int] = ()) -> list[Any]:
        """Begin an attempt at the present step, with the batches of these numbers.

        Raises:
            Repeat: There is no attempt left to make: a peer has given the state after the step.
        """
        step = self.step
        assert step is not None
        given = self._read(batches, restores=False)  # the attempt seeds the generators
        if not self._cycle.another_attempt(step):
            self.is_pending = True
            raise Repeat
        if self._feed is not None:
            for number in batches:
                self._feed.begin_attempt(number)
        if not self._context.values.can_restore:
            # No attempt sets variables of a script. Without this a rank that is lost in its first
            # update would be replaced by one that leaves out the code after that step.
            self._context.values.save(step, {})
        self._cycle.begin()
        self._is_open = True
        return given

    def batch(self, number: int) -> list[Any]:
        """The batch of this number, for the code after a step that is committed."""
        return self._read([number], restores=True)

    def _read(self, numbers: Sequence[int], *, restores: bool) -> list[Any]:
        if self._feed is None or not numbers:
            return []
        self._feed.has(numbers[0])
        return [self._feed.batch(number, restores=restores) for number in numbers]

    def load_committed(self) -> None:
        """Before the code after a step that this process has not run: the parts as committed."""
        self._cycle.skip_attempts()

    def commit(self) -> None:
        """All that belongs to the step is done.

        Raises:
            Repeat: The attempt was abandoned.
        """
        step = self.step
        if not self._is_open or step is None:
            return
        self._is_open = False
        self._context.values.save(step, {})
        self._cycle.end(None)
        if self._cycle.another_attempt(step):
            raise Repeat

    def abandon(self, error: BaseException) -> bool:
        """An exception has left the attempt. False: it is the script's own."""
        if isinstance(error, Repeat):
            return True
        if not self._is_open:
            return False
        self._is_open = False
        return self._cycle.end(error)

    def section(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """What the function returns in a section of the job."""
        return self._new_section(name).run(function, *args)

    def finish(self) -> None:
        """The framework has left its loop.

        If that was before the last step, `total` is the number of the steps that are done by now.
        """
        if self.step is not None and self._context.step >= self._total():
            self.begin_turn()
        if self._feed is not None:
            self._feed.close()
