"""From a broken step to the one where the job resumes: park, wait for an order, carry it out.

`step_cycle.py` calls it in the training thread when the groups are broken. The orders come from the
manager (`worker/manager_connection.py`); `apply_plan.py` carries out repairs,
`checkpoints/emergency_checkpoint.py` writes the emergency checkpoint.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from torch.distributed import Store

from taskd.errors import Permanent, Transient
from taskd.model.ids import Step as CommittedStep
from taskd.model.messages import Dump, Leave, Repair
from taskd.model.worker import DumpFinished, GiveUp, Order, ThreadParked
from taskd.torch import apply_plan, compat
from taskd.torch.checkpoints import emergency_checkpoint
from taskd.torch.context import JobContext
from taskd.torch.groups import ddp_buckets
from taskd.torch.operations import nic_switch
from taskd.torch.startup.start_mark import StartMark
from taskd.torch.state import sharded
from taskd.worker.manager_connection import ManagerConnection

log = logging.getLogger(__name__)

CHECKPOINT_TIMEOUT_S = 600.0


class NotRepaired(Permanent):
    """A fault could not be repaired inside the process.

    Raised by `Step` and `Job.steps` when the manager gives up, or sends no order in time. The
    message gives the reason and the fault before it. The process ends as it would have ended
    without TaskD, and the launcher decides what follows: usually all ranks restart from the last
    checkpoint. A script need not catch it.

    Example:
        Catch it only to clean up, and raise it again:

        ```python
        try:
            train(job)
        except taskd.NotRepaired as error:
            tracker.finish(status="failed", reason=str(error))
            raise
        ```
    """


class Recovery:
    """Recovers one job that has a manager."""

    def __init__(
        self, context: JobContext, manager: ManagerConnection, start_mark: StartMark
    ) -> None:
        self._context, self._manager, self._start_mark = context, manager, start_mark
        self._order: Order | GiveUp | None = None
        """An order that came while we were parked inside a step, to be carried out at its end."""
        self._sized_for = context.world_size

    @property
    def store(self) -> Store:
        """The job's store. A new one replaces it when it is lost."""
        return self._start_mark.store

    def may_finish(self) -> bool:
        """Park inside a step whose sums are complete, until the plan says which way it goes.

        True: the job resumes at the step after this one.
        """
        context = self._context
        after = CommittedStep(context.step + 1)
        copies = context.copies.finish_and_list()
        position = context.position.report()
        self._order = self._park(
            ThreadParked(after, whole=True, undo=True, copies=copies, **position)
        )
        match self._order:
            case Repair(resume=at) | Dump(step=at):
                return at == after
            case _:
                return False

    def run(self) -> None:
        """Park until the job is repaired. Returns at the step where it resumes."""
        context = self._context
        while True:
            order, self._order = self._order, None
            if order is None:
                held = context.held_step
                copies = context.copies.finish_and_list()
                at, position = CommittedStep(held or 0), context.position.report()
                order = self._park(
                    ThreadParked(at, whole=held is not None, copies=copies, **position)
                )
            match order:
                case Repair() if self._repair(order):
                    return
                case Repair():
                    continue
                case Leave(because=because):
                    log.info("leaving the job: %s", because)
                    raise SystemExit(0)
                case Dump():
                    self._write_checkpoint(order)
                    raise SystemExit(0)
                case GiveUp(because=because):
                    raise NotRepaired(f"{because}; before that: {context.groups.why}")

    def choose_buddy(self) -> None:
        """Choose the rank that keeps our second copies, at the current rendezvous."""
        groups = self._context.groups
        self._context.copies.choose_buddy(groups.rendezvous, groups.world.shape.ranks)

    def _park(self, parked: ThreadParked) -> Order | GiveUp:
        self._context.beacon.phase("parked", self._context.incident)
        if parked.whole:  # a replacement does not know whether the job has started
            self._start_mark.renew()
        return self._manager.park(parked)

    def _repair(self, plan: Repair) -> bool:
        """False: it failed, and the manager makes another plan."""
        context = self._context
        if not self._is_at_store(plan.store):
            self._manager.repair_failed(plan.incident, f"the store {plan.store} does not answer")
            return False
        context.copies.wait()
        context.incident = plan.incident
        context.beacon.phase("repairing", plan.incident)
        context.protected.step = context.held_step
        for model in context.protected.models:
            # An evaluation leaves gathered weights behind, which a replacement does not have.
            sharded.reset(model)
        try:
            done = apply_plan.apply(plan, context, self.choose_buddy)
        except Transient as error:
            context.held_step = context.protected.step  # it may have received a state already
            self._manager.repair_failed(plan.incident, str(error))
            return False
        agreement = context.protected.agreement
        compat.reset_pipelines(agreement is not None and plan.resume > agreement.start)
        if context.guard is not None:
            context.guard.verdict = None
        context.step = context.held_step = plan.resume
        context.position.resumed(plan)
        if context.position.turn == plan.resume:
            context.protected.enter_turn()
        self._set_members(tuple(sorted(member.rank for member in plan.members)))
        context.copies.on_commit(context.step, plan.incident)
        self._manager.step = CommittedStep(context.step)
        context.beacon.stepped(context.step)
        context.beacon.phase("between steps", plan.incident)
        self._manager.repaired(done)
        return True

    def _is_at_store(self, address: str) -> bool:
        """A store that is new gets what a replacement needs. False: it does not answer."""
        if not address:
            return True
        copies = self._context.groups.setup.copies
        try:
            is_new = self._start_mark.meet_at(address)
        except RuntimeError as error:
            log.warning("cannot use the store at %s: %s", address, error)
            return False
        if is_new and copies is not None:
            copies.copy_peer()
        return True

    def _set_members(self, members: tuple[int, ...]) -> None:
        """The job may have another size now."""
        context = self._context
        if len(members) != self._sized_for:
            for model in context.protected.ddp_models():
                ddp_buckets.resize(model, context.groups)
            self._sized_for = len(members)
        context.members = sharded.by_replica(context.protected, members)

    def _write_checkpoint(self, order: Dump) -> None:
        """Write the emergency checkpoint together with the other survivors."""
        context = self._context
        context.beacon.phase("leaving", order.incident)
        ranks = tuple(sorted(member.rank for member in order.members))
        address = order.store or context.settings.store
        timeout = timedelta(seconds=CHECKPOINT_TIMEOUT_S)
        because = ""
        try:
            nic_switch.agree_on_interface(
                address, order.incident, ranks, context.rank, may_leave=True
            )
            prefix = f"{order.incident}/"
            context.groups.form_default(order.incident, address, prefix, timeout, ranks)
            context.groups.open()
            emergency_checkpoint.save(
                context.local_state, order.step, order.incident, order.directory
            )
        except Transient as error:
            because = str(error)
        self._manager.dump_finished(DumpFinished(order.incident, order.step, because))
        self._manager.close()
