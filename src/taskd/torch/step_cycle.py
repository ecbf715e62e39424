"""What happens around a step: begin, the gates before the update, commit or abandon.

The gates are hooks in the optimizers and models. The optimizer's pre-hook leaves the step when its
groups have lost a collective or the manager has asked for a stop, so that wrong values never reach
the weights; the post-hook records that the update is done. `recovery.py` repairs what broke.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from taskd.errors import SettingsError
from taskd.model.faults import FaultCause
from taskd.model.ids import Step as CommittedStep
from taskd.torch.context import JobContext
from taskd.torch.groups.ddp_buffers import BufferExchange
from taskd.torch.guard import Corrupt, Guard
from taskd.torch.recovery import Recovery
from taskd.torch.state import sharded
from taskd.torch.state.undo import Undo

log = logging.getLogger(__name__)


class Abandon(BaseException):
    """Leaves a step from inside. The step handles it; the script never sees it."""


class StepCycle:
    """Runs the steps of one job."""

    def __init__(self, context: JobContext, recovery: Recovery | None) -> None:
        """`recovery` is None in a job without a manager: a fault is then raised."""
        self.context, self._recovery = context, recovery
        self._groups = context.groups
        self._undo: Undo | None = None
        self._exchanges: list[BufferExchange] = []
        self._retry_on: tuple[type[Exception], ...] = ()
        self._keep_gradients = False
        """The last step made no update: its gradients belong to this one, too."""
        self._updates = 0
        """How many optimizers have finished in the current step."""
        self._may_finish = False
        """The groups are broken, but the step has everything it needs and is to be finished."""
        self._updating = False
        """An optimizer has passed the gate in this step: weights may have changed."""
        self._gate_passed = False
        """Everything that has to be exchanged in this step has been."""
        self._has_warned = False

    def watch(self, exchanges: list[BufferExchange], retry_on: tuple[type[Exception], ...]) -> None:
        """Put the gates into what the script has protected."""
        protected = self.context.protected
        self._undo = Undo(protected)
        self._exchanges, self._retry_on = exchanges, retry_on
        for optimizer in protected.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        if self.context.manager is not None:
            for model in protected.models:
                # Do not even begin a pass whose result cannot be used.
                model.register_forward_pre_hook(self._leave_if_broken, prepend=True)

    # Begin and end

    def begin(self) -> None:
        self._updates, self._updating = 0, False
        self._gate_passed, self._may_finish = False, False
        if self.context.manager is None:
            return
        assert self._undo is not None
        self._undo.save(self._keep_gradients)
        self.context.beacon.phase("training", self.context.incident)
        self._groups.enter_step()

    def end(self, error: BaseException | None) -> bool:
        """Whether the exception that left the step, if any, was handled."""
        context, manager = self.context, self.context.manager
        if error is None:
            try:
                # Also for a step whose optimizer a grad scaler has skipped.
                if not self._gate_passed and self._groups.absorbing:
                    self._exchange_and_agree()
            except Abandon as abandoned:
                error = abandoned
        broken = self._groups.leave_step() and manager is not None
        if error is None and (self._updates or not broken):
            self._commit()
        elif manager is not None and isinstance(error, Corrupt):
            self._abandon()
            context.mark_corrupt(str(error))
        elif isinstance(error, Abandon) or (broken and isinstance(error, Exception | None)):
            self._abandon()
        elif manager is not None and isinstance(error, self._retry_on):
            self._abandon()
            manager.step_failed(FaultCause.EXCEPTION, f"{type(error).__name__}: {error}")
            broken = True
        else:
            return False
        if self._recovery is not None and (broken or context.needs_recovery()):
            self._recovery.run()
        return True

    def _commit(self) -> None:
        context = self.context
        context.step += 1
        context.held_step = context.step
        self._keep_gradients = not self._updates
        if context.manager is not None and self._keep_gradients:
            self._warn_about_accumulation()
        context.copies.on_commit(context.step, context.incident)
        context.beacon.stepped(context.step)
        context.beacon.phase("between steps", context.incident)
        if context.manager is not None:
            context.manager.step = CommittedStep(context.step)
            if context.manager.awaited:
                context.manager.committed(CommittedStep(context.step))

    def _warn_about_accumulation(self) -> None:
        if not self._has_warned and self._undo is not None and self._undo.left_gradients():
            self._has_warned = True
            log.warning(
                "step %d made no update and left gradients for the next step. If a rank is "
                "replaced before the update, its gradients are lost, and the weights differ from "
                "those of an undisturbed run: do all backward passes of an update in one step",
                self.context.step - 1,
            )

    def _abandon(self) -> None:
        if self._updating:
            # The update is done, or half done, and what had to follow it is not: the state is
            # that of no step.
            self.context.held_step = None
        if self._undo is not None:
            for model in self.context.protected.models:
                sharded.reset(model)
            self._undo.restore()

    # The gates

    def _before_update(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`args` begin with the optimizer. A closure does all that belongs before the gate."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not self._groups.absorbing:
            self._gate()
            return None
        return args[:1], {**kwargs, "closure": self._with_gate(optimizer, closure)}

    def _with_gate(self, optimizer: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure with the gate behind it. Only one evaluation can be undone."""
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
        if self._groups.absorbing and not self._gate_passed:
            # From here on other ranks may commit this step: there is no way back.
            self._exchange_and_agree()
        else:
            self._leave_if_broken()
        self._updating = True

    def _exchange_and_agree(self) -> None:
        """Everything that has to be exchanged before this step can be committed."""
        for exchange in self._exchanges:
            exchange.run()
        self._groups.wait_for_devices()
        self._leave_if_broken()
        guard = self.context.guard
        if guard is not None and guard.is_due(self.context.step):
            self.compare_replicas(guard)
        self._agree_on_update()
        self._gate_passed = True

    def _leave_if_broken(self, *_: Any) -> None:
        if self._groups.absorbing and self._groups.is_broken() and not self._may_finish:
            raise Abandon

    def _after_update(self, *_: Any) -> None:
        self._updates += 1

    def compare_replicas(self, guard: Guard) -> None:
        """Leave the step if the replicas do not hold the same bits, and have that repaired."""
        context = self.context
        verdict = guard.compare(context.step)
        if verdict is not None and not verdict.named:
            return
        if verdict is not None:
            guard.verdict = verdict
            context.copies.distrust(verdict.named, verdict.agreed)
            if context.rank in verdict.named:
                context.held_step = None
            # The first report ends the step on all ranks. A rank without the verdict would then
            # keep a state that may be wrong. So no rank reports before all have the verdict.
            self._groups.barrier()
            if context.rank in verdict.named:
                context.mark_corrupt(f"at step {context.step} {verdict.because}")
            else:
                # The named ranks have reported and do not enter this barrier. It ends when the
                # manager parks us.
                self._groups.barrier()
        raise Abandon

    def _agree_on_update(self) -> None:
        """Where a shard has few holders, all ranks agree that the step is good before any updates.

        A rank that passes knows that all others have arrived with complete sums. A rank that does
        not pass can still go either way: it parks here, with its gradients, and offers both the
        step before and the step after, until the plan says from which of them the job resumes.
        """
        self.context.copies.wait()  # the update would change what is being copied
        if not self.context.shard or self._recovery is None:
            return
        self._groups.barrier()
        if not self._groups.is_broken():
            return
        if len(self.context.protected.optimizers) == 1 and self._recovery.may_finish():
            self._may_finish = True
            return
        raise Abandon
