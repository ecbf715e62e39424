"""One training step and the attempts at it: one is committed as a whole, others leave no trace.

`Job.steps` yields steps; `step_cycle.py` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from taskd.torch.loop import attempt_values
from taskd.torch.loop.loop_variables import Undone
from taskd.torch.state import sharded

if TYPE_CHECKING:
    from taskd.torch.step_cycle import StepCycle

T = TypeVar("T")


class Cycle(Protocol):
    """What happens around an attempt."""

    def begin(self) -> None: ...
    def end(self, error: BaseException | None) -> bool: ...


class Attempt:
    """One attempt at a step or section, as a context: `for attempt in step: with attempt: …`.

    When the block ends, the step is committed on this rank; or the attempt is abandoned, the job is
    repaired, and everything is as it was before the attempt.
    """

    def __init__(self, cycle: Cycle) -> None:
        self._cycle = cycle

    def __enter__(self) -> Attempt:
        """Begin the attempt."""
        self._cycle.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Commit the step, or abandon the attempt and repair the job.

        Returns:
            True if an exception was handled: the attempt was abandoned.

        Raises:
            NotRepaired: The fault could not be repaired while this process is running.
        """
        return self._cycle.end(error)


class StepAttempt(Attempt):
    """An attempt at a step; it keeps what it has computed for a replacement of this rank."""

    def __init__(self, cycle: StepCycle, number: int) -> None:
        super().__init__(cycle)
        self._steps, self._context, self._number = cycle, cycle.context, number
        self._begin = 0

    def __enter__(self) -> Attempt:
        frame = attempt_values.calling_frame()
        self._begin = frame.f_lasti
        super().__enter__()
        if self._context.manager is not None:
            self._steps.variables_before = Undone(frame)
            self._steps.variables_now = lambda: attempt_values.set_by_update(self._begin, frame)
            self._steps.warnings.attributes(frame)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if error is None:
            variables = attempt_values.set_since(self._begin, attempt_values.calling_frame())
            self._context.values.save(self._number, variables | self._context.variables.written())
        handled = super().__exit__(kind, error, trace)
        undone = self._steps.variables_before
        if handled and undone is not None and not self._steps.is_committed_here:
            undone.restore()
            if self._steps.context.step > self._number:
                undone.warn_about_loss(self._number)
        return handled


class Step(int):
    """The number of a training step, and the attempts at it.

    `Job.steps` yields steps; a script does not create them. A step is an `int`, so it can be used
    directly as an index, in a checkpoint or in a log line.

    Iterate over it to get its attempts. What happens inside `with attempt:` is committed as a whole
    when the block ends. If a rank is lost before that, the attempt is abandoned on all ranks, the
    job is repaired, and there is another attempt: weights, optimizer state, buffers, random
    numbers and all other protected state are as they were before. The loop over the attempts ends
    when the step is committed, so that the code after it (writing a checkpoint, logging to a
    tracker) runs once per step.

    The update should be the last action of an attempt: after a fault between an update and the end
    of the block, this rank has to receive its state from a peer or a snapshot.

    Example:
        ```python
        for step in job.steps(10_000):
            for attempt in step:
                with attempt:
                    optimizer.zero_grad()
                    loss = loss_fn(model(batch(step)))
                    loss.backward()
                    optimizer.step()
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.4f}")
        ```

    `with step:` is a shorter form for steps that are followed by no code: after a fault the same
    step is yielded again, so code after the block would also run for the abandoned attempt.
    """

    _cycle: StepCycle

    def __new__(cls, number: int, cycle: StepCycle) -> Step:
        self = super().__new__(cls, number)
        self._cycle = cycle
        return self

    def __iter__(self) -> Iterator[Attempt]:
        """Yield attempts until the step is committed.

        Raises:
            NotRepaired: The fault could not be repaired while this process is running.
        """
        tried = False
        while self._cycle.another_attempt(self):
            tried = True
            yield StepAttempt(self._cycle, self)
        if not tried:
            # This process has joined after the attempts of its predecessor.
            self._cycle.skip_attempts()
            context = self._cycle.context
            values = context.values_after(self)
            context.variables.put(attempt_values.calling_frame(), values)

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the step as a function: call it in an attempt, until the step is committed.

        Args:
            function: One attempt at the step, such as `train_step`.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the function has returned in its last attempt. In a replacement that joins after
            the attempts: what it has returned to the predecessor. If that was lost, or this rank
            could not finish its own attempt and has received the state after it from a peer: the
            same as after an earlier step, with NaN in place of each number. Only numbers, strings,
            small tensors, and lists and dictionaries of them are kept; anything else becomes None.

        Example:
            ```python
            for step in job.steps(10_000):
                loss = step.run(train_step, model, optimizer, batch(step))
            ```
        """
        context, results, tried = self._cycle.context, list[T](), False
        values, variables = context.values, context.variables
        self._cycle.warnings.outer_variables(function)
        while self._cycle.another_attempt(self):
            tried = True
            results.clear()
            with Attempt(self._cycle):
                self._cycle.variables_now = dict
                results.append(function(*args, **kwargs))
                values.save(self, {attempt_values.RESULT: results[0]} | variables.written())
        if results:
            return results[0]
        kept = context.values_after(self) if not tried else values.restore(self)
        if not tried:
            self._cycle.skip_attempts()
            variables.objects.put(kept.get(attempt_values.OBJECTS, {}))
        return kept.get(attempt_values.RESULT)  # type: ignore[return-value]

    def verified(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a forward and backward pass that another rank can repeat, to verify its gradients.

        With `protect(verify_every=n)`, in every n-th step each rank computes the gradients of
        another rank's batch as well as its own, and the two results of each batch are compared. A
        rank whose result differs from those of two others is replaced, and the step is
        replayed. Without `verify_every`, and in all other steps, it only calls the function. If a
        step calls it more than once, the first call is verified.

        Args:
            function: Computes the loss and calls `backward()`. It must depend on nothing but its
                arguments, the protected models and random numbers; it must not communicate (apart
                from the gradient exchange of DDP), update weights, or change protected objects or
                its arguments. Contexts such as `torch.autocast` belong inside it.
            *args: The batch: tensors and other data that can be pickled, no models.
            **kwargs: Its keyword arguments, with the same limits.

        Returns:
            What the function has returned.

        Example:
            ```python
            def forward_backward(images, labels):
                loss = loss_fn(model(images), labels)
                loss.backward()
                return loss.detach()

            for step, (images, labels) in job.batches(loader):
                for attempt in step:
                    with attempt:
                        optimizer.zero_grad()
                        loss = step.verified(forward_backward, images, labels)
                        optimizer.step()
            ```
        """
        verification = self._cycle.context.verification
        if verification is None:
            return function(*args, **kwargs)
        return verification.run(self, function, args, kwargs)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """In a checkpoint, or sent to another process, it is only a number."""
        return int, (int(self),)

    def __enter__(self) -> Step:
        """Begin the step."""
        self._cycle.without_attempts()
        self._cycle.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Commit the step, or abandon it and repair the job. See `Attempt.__exit__`."""
        handled = self._cycle.end(error)
        if handled and self._cycle.context.step <= self:
            self._cycle.warnings.code_after(self)
        return handled

    @property
    def epoch(self) -> int:
        """The epoch that this step belongs to. Only for steps of `Job.batches`."""
        return self._cycle.feed_of_steps().epoch(self)

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last step of its epoch. Only for steps of `Job.batches`.

        Read it after the step: where the length of an epoch is not known, a rank learns only during
        a step that another one has no more data.

        Example:
            ```python
            for step, batch in job.batches(loader, epochs=3):
                for attempt in step:
                    with attempt:
                        train_one_step(model, optimizer, batch)
                if step.ends_epoch:
                    print(f"epoch {step.epoch} is done")
            ```
        """
        return self._cycle.feed_of_steps().ends_epoch(self)

    @property
    def share(self) -> float:
        """The factor by which to multiply the loss of each part.

        With it, the gradients are those of the complete batch, also when ranks are missing and
        their parts are computed by others. It is 1.0 while no rank is missing, and with
        `elastic="scale"`.

        Example:
            ```python
            with attempt:
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
