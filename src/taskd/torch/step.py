"""One training step as a context: it commits, or it never was.

The gates: the optimizer's pre-hook leaves the step when its groups have lost a collective or the
job was told to stop, so that garbage never reaches the weights; the post-hook marks the update.
`job.py` owns the steps, `mending.py` mends what broke in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskd.errors import SettingsError
from taskd.torch.state import sharded

if TYPE_CHECKING:
    from taskd.torch.job import Job


class Abandon(BaseException):
    """Leaves a step from within. The step takes it back; user code never sees it."""


class Step(int):
    """The number of the step, and the context in which it is done."""

    _job: Job

    def __new__(cls, number: int, job: Job) -> Step:
        self = super().__new__(cls, number)
        self._job = job
        return self

    def __enter__(self) -> Step:
        self._job._begin()
        return self

    @property
    def share(self) -> float:
        """Multiply each part's loss by this: then the gradients are those of the whole batch."""
        job = self._job
        return len(job.members) / job.world_size if job.elastic == "accumulate" else 1.0

    def parts(self, model: Any = None) -> Iterator[int]:
        """The parts of this step's batch that fall to this rank, by the number of their rank.

        One, its own; more when ranks are missing, so that every sample is still used once. All
        backward passes but the last are kept from exchanging gradients.
        """
        mine = self._job._parts()
        for part in mine[:-1]:
            with _unsummed(model):
                yield part
        yield mine[-1]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        return self._job._end(error)


def _unsummed(model: Any) -> AbstractContextManager[Any]:
    """Backward passes in here keep their gradients from the other replicas."""
    if hasattr(model, "no_sync"):
        return model.no_sync()  # type: ignore[no-any-return]
    if hasattr(model, "set_requires_all_reduce"):
        return sharded.unsummed(model)
    return nullcontext()


class Gates:
    """The hooks in the optimizers and models of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.updated = 0
        """How many optimizers have finished in the current step."""
        self.finishing = False
        """The groups are broken, but the step has everything it needs and is to be finished."""
        self.updating = False
        """An optimizer has been let through in this step: weights may have changed."""
        self._passed = False
        """All that has to be exchanged in this step has been."""

    def begin(self) -> None:
        self.updated, self.updating = 0, False
        self._passed, self.finishing = False, False

    def end(self) -> None:
        """The step was left well; also one whose optimizer a grad scaler has skipped."""
        if not self._passed and self._job._groups.absorbing:
            self._pass()

    def hook(self, optimizer: Any) -> None:
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after)

    def watch(self, model: Any) -> None:
        """Not even begin a pass whose result nobody can use."""
        model.register_forward_pre_hook(self._before, prepend=True)

    def _before_update(self, optimizer: Any, args: tuple[Any, ...], told: dict[str, Any]) -> Any:
        """`args` begin with the optimizer. A closure does all that belongs before the gate."""
        closure = told.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._job._groups.absorbing:
            self._gate()
            return None
        return args[:1], {**told, "closure": self._gated(optimizer, closure)}

    def _gated(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with the gate behind it. One evaluation is all that can be taken back."""
        evaluated = False

        def once() -> Any:
            nonlocal evaluated
            if evaluated:
                raise SettingsError(
                    [
                        f"{type(optimizer).__name__} cannot be protected: it changes the weights, "
                        "evaluates its closure again, and a fault in between could not be undone"
                    ]
                )
            evaluated = True
            loss = closure()
            self._gate()
            return loss

        return once

    def _gate(self) -> None:
        if self._job._groups.absorbing and not self._passed:
            self._pass()  # from here on the step may count elsewhere: no turning back
        else:
            self._before()
        self.updating = True

    def _pass(self) -> None:
        """All that has to be exchanged before this step can count."""
        self._job._share_buffers()
        self._job._groups.land()
        self._before()
        guard = self._job._guard
        if guard is not None and guard.is_due(self._job.step):
            self._job._compare(guard)
        self._job._vote()
        self._passed = True

    def _before(self, *_: Any) -> None:
        groups = self._job._groups
        if groups.absorbing and groups.trouble() and not self.finishing:
            raise Abandon

    def _after(self, *_: Any) -> None:
        self.updated += 1
