"""What happens around a step: begin, the gates before the update, commit or abandon.

The gates are hooks in the optimizers and models. The optimizer's pre-hook leaves the step when its
groups have lost a collective or the manager has asked for a stop, so that wrong values never reach
the weights; the post-hook records that the update is done. `recovery.py` repairs what broke.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

from taskd.errors import SettingsError
from taskd.model.faults import FaultCause
from taskd.model.ids import Step as CommittedStep
from taskd.model.messages import NO_TURN
from taskd.torch import random_state
from taskd.torch.context import JobContext
from taskd.torch.data.batch_feed import Feed
from taskd.torch.device_gate import DeviceGate, open_gate
from taskd.torch.groups.ddp_buffers import BufferExchange
from taskd.torch.groups.refused_uses import refuse_capture
from taskd.torch.loop.attempt_values import Values
from taskd.torch.loop.loop_variables import Undone
from taskd.torch.loop.script_warnings import ScriptWarnings
from taskd.torch.recovery import NotRepaired, Recovery
from taskd.torch.replicas.guard import Corrupt, Guard
from taskd.torch.state import sharded
from taskd.torch.state.undo import Undo
from taskd.torch.verify.verification import Verification

log = logging.getLogger(__name__)

WATCHED_STEPS = 3
"""So many steps show whether a script changes weights between two passes of a step."""


class Abandon(BaseException):
    """Leaves a step from inside. The step handles it; the script never sees it."""


class StepCycle:
    """Runs the steps of one job."""

    def __init__(self, context: JobContext, recovery: Recovery | None) -> None:
        """`recovery` is None in a job without a manager: a fault is then raised."""
        self.context, self._recovery = context, recovery
        self._groups = context.groups
        self.undo: Undo | None = None
        self._exchanges: list[BufferExchange] = []
        self._retry_on: tuple[type[Exception], ...] = ()
        self._updates = 0
        """How many optimizers have finished in the current step."""
        self._begun = 0
        """How many attempts this process has begun."""
        self._updating = False
        """An optimizer has passed the gate in this step: weights may have changed."""
        self._begun_at_update = 0
        """How many collectives had begun when the first optimizer passed the gate."""
        self._gate_passed = False
        """Everything that has to be exchanged in this step has been."""
        self._device_gate: DeviceGate | None = None
        self._is_copied = False
        """The copy of the state after this step has begun."""
        self._is_recorded = False
        """The parts are recorded as they are after this step."""
        self._is_promised = False
        """The plan counts on this rank to finish the step, though others were lost in it."""
        self.is_committed_here = False
        """The last attempt was completed by this rank."""
        self._attempted = -1
        """The step of the last attempt."""
        self.variables_before: Undone | None = None
        """What the script's variables were when the last attempt began."""
        self.variables_now: Callable[[], Values] | None = None
        """What the attempt has set in the script's variables."""
        self.by_attempts = False
        """The script iterates over the attempts at a step; otherwise it uses `with step:`."""
        self.section = ""
        """The name of the section that is running."""
        self.warnings = ScriptWarnings(context)
        self.feed: Feed | None = None
        """Where the batches come from, if the script uses `Job.batches`."""

    def watch(self, exchanges: list[BufferExchange], retry_on: tuple[type[Exception], ...]) -> None:
        """Put the gates into what the script has protected."""
        protected = self.context.protected
        self.undo = Undo(protected)
        self._exchanges, self._retry_on = exchanges, retry_on
        self.warnings.watch(protected.parameters)
        for optimizer in protected.optimizers:
            optimizer.register_step_pre_hook(self._before_update)
            optimizer.register_step_post_hook(self._after_update)
        if self.context.manager is not None:
            self._device_gate = open_gate(protected)
            for model in protected.models:
                model.register_forward_pre_hook(self._before_pass, prepend=True)

    def feed_of_steps(self) -> Feed:
        if self.feed is None:
            raise SettingsError(["only a step of Job.batches has an epoch"])
        return self.feed

    # The attempts at a step

    def another_attempt(self, number: int) -> bool:
        """Bring the job to the start of this step. False: the step is committed."""
        context, position = self.context, self.context.position
        self.by_attempts, position.earliest = True, number
        while self._recovery is not None and context.needs_recovery():
            self._recovery.run()
        self._go_back()
        if context.step < number:
            raise NotRepaired(
                f"the job resumes at step {context.step}, but this process is at step {number} and "
                "cannot go back"
            )
        if context.step == number:
            random_state.seed_step(context.base_seeds, number, random_state.ATTEMPT)
            return True
        position.earliest = number + 1
        # If the job was repaired at the end of the step: the replacement runs this code, too.
        self._groups.formed_for_step = self._groups.formed
        random_state.seed_step(context.base_seeds, number, random_state.AFTER)
        return False

    def skip_attempts(self) -> None:
        """A replacement has run the code before a step that is committed, and runs that after it.

        The former may have changed parts that were already those after the step.
        """
        if self.context.manager is not None:
            self.context.protected.load_recorded()

    def without_attempts(self) -> None:
        """The script uses `with step:`: the loop can go back to any step."""
        position = self.context.position
        if position.turn != NO_TURN and position.sections:
            raise SettingsError(
                [
                    "a loop with sections needs `for attempt in step: with attempt:` instead of "
                    "`with step:`"
                ]
            )
        self.by_attempts = False
        position.leave_turns()

    # Begin and end

    def begin_turn(self, number: int) -> None:
        """The code after the last step is done."""
        if self.context.comparison is not None:
            self.context.comparison.begin_turn(number)
        self.context.position.begin_turn(number)

    def begin(self) -> None:
        self._updates, self._updating, self._begun = 0, False, self._begun + 1
        self._gate_passed = False
        self._is_copied, self._is_recorded = False, False
        self.is_committed_here = self._is_promised = False
        self._attempted = self.context.step
        self.variables_before = self.variables_now = None
        if self.feed is not None:
            self.feed.begin_attempt(self.context.step)
        if self.context.verification is not None:
            self.context.verification.begin()
        if self.context.manager is None:
            return
        assert self.undo is not None
        self.warnings.begin_step()
        self._remember()
        self.context.beacon.phase("training", self.context.incident)
        self._groups.enter_step()

    def end(self, error: BaseException | None) -> bool:
        """Whether the exception that left the step, if any, was handled."""
        context, manager = self.context, self.context.manager
        if not self._pass_device_gate() and error is None:
            error = Abandon()
        if error is None:
            try:
                # Also for a step whose optimizer a grad scaler has skipped.
                if not self._gate_passed and self._groups.absorbing:
                    self._exchange_and_agree(self._has_left_gradients())
                self._exchange_again()
                self._check_results()
                self._finish()
                self._copy_and_vote()
                self._agree_on_checkpoint()
            except Abandon as abandoned:
                error = abandoned
        broken = self._groups.leave_step() and manager is not None
        if error is None and (self._is_complete() or not broken):
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
            self._go_back()
        if manager is not None:
            self.warnings.end_step()
        return True

    def _go_back(self) -> None:
        """If the job resumes at the step that this rank had committed: that attempt is undone.

        The state has come back by the repair, the script's own variables and objects have not.
        """
        if self.is_committed_here and self.context.step <= self._attempted:
            self.is_committed_here = False
            self.context.variables.objects.undo()
            if self.variables_before is not None:
                self.variables_before.restore()

    def _pass_device_gate(self) -> bool:
        """Wait until the device makes the update. False: it must not, and has been brought back."""
        held = None if self._device_gate is None else self._device_gate.settle()
        if held is None or held.is_complete:
            return True
        self._updates, self._updating = 0, not held.restore()
        return False

    def _is_complete(self) -> bool:
        """Whether this rank holds the state after the step, even if others are lost."""
        return self._updates > 0 or self._is_promised

    def _finish(self) -> None:
        """What only this rank has does not change any more in this step."""
        context = self.context
        if context.comparison is not None and (self._is_complete() or not self._groups.is_broken()):
            context.comparison.finish(context.step + 1)
            self._is_recorded = True

    def _copy_and_vote(self) -> None:
        """Before a step of a sharded job is committed: every shard of it has a complete copy.

        Only with attempts: a rank that has left the step cannot go back to it. If copying takes
        long, it goes on in the background, and a rank that is lost meanwhile costs the others
        their processes (`repair_plan.py`).
        """
        context = self.context
        if self._groups.is_broken() or not (self.by_attempts and context.votes):
            return
        if context.copies.each_step:
            context.copies.copy_before_vote(context.step + 1, context.incident)
            self._is_copied = True
            self._groups.barrier()

    def _agree_on_checkpoint(self) -> None:
        """Where several ranks write parts of a checkpoint: are all of them ready to copy theirs?"""
        context, checkpoints = self.context, self.context.copies.checkpoints
        after = context.step + 1
        if not context.votes or self._groups.is_broken() or not checkpoints.is_due(after):
            return
        if self._groups.is_true_everywhere(checkpoints.is_ready()):
            checkpoints.agreed(after)

    def _commit(self) -> None:
        context = self.context
        context.step += 1
        context.held_step = context.step
        self.is_committed_here = True
        if context.is_protected:
            context.protected.has_left_gradients = not self._updates
        if not self._is_copied:
            context.copies.on_commit(context.step, context.incident)
        context.beacon.stepped(context.step)
        context.beacon.phase("between steps", context.incident)
        if context.manager is not None:
            context.manager.step = CommittedStep(context.step)
        self.report_progress()

    def report_progress(self) -> None:
        """The first step, or section, after a repair is complete."""
        context = self.context
        if context.manager is not None and context.manager.awaited:
            context.manager.committed(CommittedStep(context.step))

    def _abandon(self) -> None:
        if self._updating:
            # The update is done, or half done, and what had to follow it is not: the state is
            # that of no step.
            self.context.held_step = None
        if self._is_recorded:
            self.context.protected.record_before()
        self.context.values.take_back(self.context.step)
        if self.context.values_at_update.kept_at(self.context.step) is not None:
            self.context.values_at_update.forget_predecessor()
        self._restore()

    def _remember(self) -> None:
        assert self.undo is not None
        self.undo.save(self.context.protected.has_left_gradients)
        self.context.variables.objects.begin_attempt()

    def _restore(self) -> None:
        if self.undo is None:
            return
        self.context.variables.objects.undo()
        for model in self.context.protected.models:
            sharded.reset(model)
        if not self.undo.restore(is_updated=self._updating):
            # The script has changed weights by itself, for the first time.
            self.context.held_step = None

    # Sections

    def begin_section(self, name: str) -> None:
        assert self.undo is not None
        self.section, self._updating = name, False
        self._remember()
        self._groups.enter_step()

    def end_section(self, error: BaseException | None) -> tuple[bool, bool]:
        """Whether this rank has come to the end of the section, and whether all others have."""
        groups, arrived = self._groups, False
        self.section = ""
        if error is None:
            groups.wait_for_devices()
            arrived = not groups.is_broken()
            groups.barrier()
        return arrived, not groups.leave_step() and error is None

    def abandon_section(self) -> None:
        """Bring back what the section has changed, and repair the job."""
        self._restore()
        if self._recovery is not None:
            self._recovery.run()

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
        if self.section:
            raise SettingsError(
                [f"section {self.section!r} updates weights: do that in an attempt at a step"]
            )
        refuse_capture("an update")
        if self._groups.absorbing and not self._gate_passed:
            # From here on other ranks may commit this step: there is no way back.
            self._exchange_and_agree(has_left_gradients=False, before_update=True)
        else:
            self._exchange_again()
            self._check_results()
        if not self._updating:
            self._updating, self._begun_at_update = True, self._groups.begun
            self._keep_values()

    def _keep_values(self) -> None:
        """If this rank is lost in the rest of the attempt, others may have committed the step."""
        context = self.context
        if self.variables_now is not None and context.manager is not None:
            values = self.variables_now() | context.variables.written()
            context.values_at_update.save(context.step, values)

    def _exchange_and_agree(self, has_left_gradients: bool, before_update: bool = False) -> None:
        """Everything that has to be exchanged before this step can be committed.

        `has_left_gradients`: the step makes no update, and its gradients belong to the next one.
        """
        for exchange in self._exchanges:
            exchange.run()
        if before_update and self._hold_device():
            self._gate_passed = True
            return
        self._groups.wait_for_devices()
        self._leave_if_broken()
        if self.undo is not None:
            self.undo.notice_changes()
        guard = self.context.guard
        if guard is not None and guard.is_due(self.context.step):
            self.compare_replicas(guard)
        verification = self.context.verification
        if verification is not None and verification.is_due(self.context.step):
            self._verify_gradients(verification)
        self._agree_on_update(has_left_gradients)
        self._gate_passed = True

    def _exchange_again(self) -> None:
        """What passes after the first update have changed: other ranks need it, too."""
        if self._groups.absorbing and self._updating and not self._groups.lost:
            for exchange in self._exchanges:
                if exchange.is_due:
                    exchange.run(is_updated=True)

    def _hold_device(self) -> bool:
        """Let the device wait instead of the host, if nothing else has to be known before."""
        context, gate = self.context, self._device_gate
        if gate is None or context.votes or context.copies.each_step or self._is_comparison_due():
            return False
        are_complete = self._groups.queue_device_waits()
        self._leave_if_broken()
        if are_complete is None:
            return False
        context.copies.wait()  # the update would change what is being copied
        if gate.hold(are_complete):
            return True
        self._device_gate = None
        return False

    def _is_comparison_due(self) -> bool:
        step, guard, comparison = self.context.step, self.context.guard, self.context.comparison
        checks = (guard, self.context.verification)
        if any(one is not None and one.is_due(step) for one in checks):
            return True
        return comparison is not None and comparison.is_due(step, has_left_gradients=False)

    def _before_pass(self, *_: Any) -> None:
        """Do not even begin a pass whose result cannot be used."""
        self._leave_if_broken()
        is_in_step = self._groups.absorbing and not self.section and not self._updating
        if self.undo is not None and is_in_step and self._begun <= WATCHED_STEPS:
            # The gate would not see a change that is taken back before it, as in SAM.
            self.undo.notice_changes()

    def _leave_if_broken(self, *_: Any) -> None:
        """After an update, only if something is missing: other ranks may have committed the step,
        and this one can commit it, too, if its own results are complete."""
        groups = self._groups
        if groups.absorbing and (groups.lost if self._updating else groups.is_broken()):
            raise Abandon

    def _check_results(self) -> None:
        """What follows an update, another update or an exchange of results, must be complete."""
        groups = self._groups
        if not (groups.absorbing and self._updating):
            return
        is_complete = not groups.has_lost()
        if self.context.comparison is not None and (
            groups.begun > self._begun_at_update or not is_complete
        ):
            self.context.comparison.has_late_exchange = True
        if not is_complete:
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
            self._report(verdict.named, verdict.because, FaultCause.CORRUPT)
        raise Abandon

    def _verify_gradients(self, verification: Verification) -> None:
        """Leave the step if a rank has computed a wrong gradient, and have that rank replaced."""
        verdict = verification.check(self.context.step)
        if verdict is not None and not verdict.named:
            return
        if verdict is not None:
            last = verification.last_right
            since = f"its gradients were right in step {last}" if last >= 0 else "none was checked"
            because = f"{verdict.because}; before that, {since}"
            self._report(verdict.named, because, FaultCause.MISCOMPUTED)
        raise Abandon

    def _report(self, named: Collection[int], because: str, cause: FaultCause) -> None:
        """The named ranks report their fault. Returns when the job is being parked."""
        context = self.context
        if context.rank in named:
            context.held_step = None
        # The first report ends the step on all ranks. A rank without the verdict would then
        # keep a state that may be wrong. So no rank reports before all have the verdict.
        self._groups.barrier()
        if context.rank in named:
            context.mark_corrupt(f"at step {context.step} {because}", cause)
        else:
            # The named ranks have reported and do not enter this barrier. It ends when the
            # manager parks us.
            self._groups.barrier()

    def _has_left_gradients(self) -> bool:
        assert self.undo is not None
        if self.context.manager is None:
            return False
        if any(map(sharded.has_unreduced_gradients, self.context.protected.models)):
            raise SettingsError(
                [
                    "a step without an update has left gradients that FSDP2 has not reduced "
                    "(set_requires_gradient_sync(False)): they could not be given to a "
                    "replacement. Do all backward passes of an update in one step"
                ]
            )
        return self.undo.left_gradients()

    def _agree_on_update(self, has_left_gradients: bool) -> None:
        """Where state exists once, all ranks agree that the step is good before any updates.

        By then the copies of what only one rank has are complete, and all ranks know where they
        have come to differ. A rank that passes knows that all others have arrived with complete
        sums. A rank that does not pass can still go either way: it parks here, with its gradients,
        and offers both the step before and the step after, until the plan says from which of them
        the job resumes.
        """
        context, comparison = self.context, self.context.comparison
        context.copies.wait()  # the update would change what is being copied
        if comparison is None or self._recovery is None:
            return
        comparison.copy_own(context.step + 1, has_left_gradients)
        if comparison.is_due(context.step, has_left_gradients):
            if comparison.compare(context.step, has_left_gradients):
                comparison.copy_own(context.step + 1, has_left_gradients)
                self._groups.barrier()
        elif context.votes:
            self._groups.barrier()
        if not self._groups.is_broken():
            comparison.sample(context.step, has_left_gradients)
            return
        one_update = len(context.protected.optimizers) == 1 and not comparison.has_late_exchange
        if context.votes and one_update and self._recovery.may_finish():
            self._groups.lost = False  # what this comparison has lost: all sums are complete
            self._is_promised = True
            return
        raise Abandon
