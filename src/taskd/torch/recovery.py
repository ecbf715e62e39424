"""From a broken step to the one where the job goes on: stand still, be told, do it.

`job.py` calls it in the training thread when the groups are in trouble. What to do comes from the
manager (`worker/manager_connection.py`); `apply_plan.py` carries out its plans,
`state/emergency_checkpoint.py` writes the last checkpoint.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING

from taskd.errors import Permanent, Transient
from taskd.model.ids import Step as Committed
from taskd.model.messages import Dump, Leave, Repair
from taskd.model.worker import DumpFinished, GiveUp, Order, ThreadParked
from taskd.torch import apply_plan as repair
from taskd.torch.apply_plan import Holding
from taskd.torch.groups import ddp_buckets as buckets
from taskd.torch.groups.store import Meeting
from taskd.torch.operations import nic_switch as switch
from taskd.torch.start_mark import Begun
from taskd.torch.state import emergency_checkpoint as dump
from taskd.torch.state import sharded
from taskd.worker.manager_connection import ManagerConnection

if TYPE_CHECKING:
    from taskd.torch.job import Job

log = logging.getLogger(__name__)

DUMP_TIMEOUT_S = 600.0


class NotRepaired(Permanent):
    """A fault could not be repaired from inside: the process ends as it would have without us."""


class Mending:
    """One for each job that has a manager."""

    def __init__(self, job: Job, link: ManagerConnection, begun: Begun) -> None:
        self._job, self._link, self._begun = job, link, begun
        self._order: Order | GiveUp | None = None
        """An order that came while we stood inside a step, to be carried out at its end."""
        self._sized_for = job.world_size

    def may_finish(self) -> bool:
        """Stand inside a step whose sums are complete, until the plan says which way it goes.

        True: the job goes on with the step after this one.
        """
        job = self._job
        after = Committed(job.step + 1)
        self._order = self._stand(
            ThreadParked(after, whole=True, undo=True, copies=job._copying.held())
        )
        match self._order:
            case Repair(resume=at) | Dump(step=at):
                return at == after
            case _:
                return False

    def mend(self) -> None:
        """Stand still until the job is whole again. Returns at the step where it goes on."""
        while True:
            order, self._order = self._order, None
            if order is None:
                held = self._job._holds
                copies = self._job._copying.held()
                order = self._stand(
                    ThreadParked(Committed(held or 0), held is not None, copies=copies)
                )
            match order:
                case Repair() if self._repaired(order):
                    return
                case Repair():
                    continue
                case Leave(because=because):
                    log.info("leaving: %s", because)
                    raise SystemExit(0)
                case Dump():
                    self._dump(order)
                    raise SystemExit(0)
                case GiveUp(because=because):
                    raise NotRepaired(f"{because}; before that: {self._job._groups.why}")

    def meet_buddy(self, meeting: Meeting) -> None:
        job = self._job
        job._copying.meet_buddy(meeting, job._groups.world.shape.ranks)

    def _stand(self, stood: ThreadParked) -> Order | GiveUp:
        self._job._beacon.phase("parked", self._job._incident)
        if stood.whole:  # a replacement has nothing to tell
            self._begun.renew()
        return self._link.park(stood)

    def _repaired(self, plan: Repair) -> bool:
        job = self._job
        job._copying.wait()
        job._incident = plan.incident
        job._beacon.phase("repairing", plan.incident)
        store = job._settings.store
        job._kept_now.step = job._holds
        try:
            mended = repair.carry_out(
                plan, self._holding(), job._groups, store, self.meet_buddy, job._guard
            )
        except Transient as error:
            job._holds = job._kept_now.step  # perhaps it had been given another state already
            self._link.repair_failed(plan.incident, str(error))
            return False
        if job._guard is not None:
            job._guard.found = None
        job.step = job._holds = plan.resume
        self._admit(tuple(sorted(member.rank for member in plan.members)))
        job._copying.committed(job.step, plan.incident)
        self._link.step = Committed(job.step)
        job._beacon.stepped(job.step)
        job._beacon.phase("between steps", plan.incident)
        self._link.repaired(mended)
        return True

    def _holding(self) -> Holding:
        job = self._job
        return Holding(job.rank, job._shard, job._holds, job._kept_now, job._copying.snapshots)

    def _admit(self, members: tuple[int, ...]) -> None:
        """The job may have another size now."""
        job = self._job
        if len(members) != self._sized_for:
            for wrapped in job._kept_now.reducers():
                buckets.renew(wrapped, job._groups)
            self._sized_for = len(members)
        job.members = sharded.by_replica(job._kept_now, members)

    def _dump(self, order: Dump) -> None:
        """Write the last checkpoint together with the other survivors."""
        job = self._job
        job._beacon.phase("leaving", order.incident)
        ranks = tuple(sorted(member.rank for member in order.members))
        address, timeout = job._settings.store, timedelta(seconds=DUMP_TIMEOUT_S)
        because = ""
        try:
            switch.settle(address, order.incident, ranks, job.rank, may_leave=True)
            job._groups.gather(order.incident, address, f"{order.incident}/", timeout, ranks)
            job._groups.open()
            dump.save(self._holding(), order.step, order.incident, order.directory)
        except Transient as error:
            because = str(error)
        self._link.dump_finished(DumpFinished(order.incident, order.step, because))
        self._link.close()
