"""One training step as a context: it is committed as a whole, or it leaves no trace.

`Job.steps` yields them; `step_cycle.py` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from taskd.torch.state import sharded

if TYPE_CHECKING:
    from taskd.torch.step_cycle import StepCycle


class Step(int):
    """The number of a training step, and the context in which it runs.

    `Job.steps` yields steps; a script does not create them. A step is an `int`, so it can be used
    directly as an index, in a checkpoint or in a log line. What happens inside `with step:` is
    committed as a whole when the block ends. If a rank is lost before that, the step is abandoned
    on all ranks, the job is repaired, and the same step is yielded again: weights, optimizer
    state, buffers, random numbers and all other protected state are as they were before it.

    Everything that must not happen twice (writing a checkpoint, logging to a tracker) belongs after
    the block. The update should be the last action in it: after a fault between an update and the
    end of the block, this rank has to receive its state from a peer or a snapshot.

    Example:
        ```python
        for step in job.steps(10_000):
            with step:
                optimizer.zero_grad()
                loss = loss_fn(model(batch(step)))
                loss.backward()
                optimizer.step()
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
        ```
    """

    _cycle: StepCycle

    def __new__(cls, number: int, cycle: StepCycle) -> Step:
        self = super().__new__(cls, number)
        self._cycle = cycle
        return self

    def __enter__(self) -> Step:
        """Begin the step."""
        self._cycle.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Commit the step, or abandon it and repair the job.

        Returns:
            True if an exception was handled: the step was abandoned and will be yielded again.

        Raises:
            NotRepaired: The fault could not be repaired while this process is running.
        """
        return self._cycle.end(error)

    @property
    def share(self) -> float:
        """The factor by which to multiply the loss of each part.

        With it, the gradients are those of the complete batch, also when ranks are missing and
        their parts are computed by others. It is 1.0 while no rank is missing, and with
        `elastic="scale"`.

        Example:
            ```python
            with step:
                for part in step.parts(model):
                    loss = loss_fn(model(batch(step, part))) * step.share
                    loss.backward()
                optimizer.step()
            ```
        """
        return self._cycle.context.loss_share()

    def parts(self, model: Any = None) -> Iterator[int]:
        """Yield the parts of this step's batch that this rank has to compute.

        A batch has one part per rank of the job's original size, named by the rank number. A rank
        normally gets one part, its own. When ranks are missing (an elastic job that continues
        without a lost node), their parts are divided between the remaining ranks, so that every
        sample is still used once; `share` weights them.

        Args:
            model: The protected model. All backward passes but the last then skip the gradient
                exchange (`no_sync` for DDP, no all-reduce between replicas for HSDP), as usual
                for gradient accumulation. Without it, every pass exchanges gradients.

        Yields:
            The number of each part. Load the data of rank `part`, compute its loss, multiply it by
            `share` and call `backward()` before taking the next one.

        Example:
            ```python
            for part in step.parts(model):
                loss = loss_fn(model(batch(step, part))) * step.share
                loss.backward()
            ```
        """
        mine = self._cycle.context.parts()
        for part in mine[:-1]:
            with _without_exchange(model):
                yield part
        yield mine[-1]


def _without_exchange(model: Any) -> AbstractContextManager[Any]:
    """Backward passes in here do not exchange gradients with other replicas."""
    if hasattr(model, "no_sync"):
        return model.no_sync()  # type: ignore[no-any-return]
    if hasattr(model, "set_requires_all_reduce"):
        return sharded.reduce_within_replica(model)
    return nullcontext()
