"""A training job as the script sees it: join, protect, step.

`init` decides how much there is to join: a job of ours (resilient groups and a line to the
manager), some other launcher's (plain groups), or nothing at all. The steps are the same in all
three, so a script needs no second version.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.optim import Optimizer

from taskd import config
from taskd.edge.beacon import Beacon
from taskd.errors import Permanent, SettingsError, Transient
from taskd.model.ids import Incarnation, NodeRank, Rank
from taskd.model.ids import Step as Committed
from taskd.model.messages import Copy, Dump, Leave, Repair
from taskd.model.rank import GiveUp, Me, Order, Stood, Wrote
from taskd.torch import (
    buckets,
    buffers,
    dump,
    group,
    nic,
    operations,
    random,
    repair,
    seam,
    sharded,
    transport,
)
from taskd.torch.buddy import Keeper
from taskd.torch.groups import Groups, Mode
from taskd.torch.meeting import Meeting
from taskd.torch.protected import Protected, Stateful
from taskd.torch.repair import Holding
from taskd.torch.snapshots import Snapshots
from taskd.torch.step import Abandon, Gates, Step
from taskd.torch.undo import Undo
from taskd.worker.link import Link
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)
DUMP_TIMEOUT_S = 600.0


class NotRepaired(Permanent):
    """A fault could not be repaired from inside: the process ends as it would have without us."""


class Job:
    """One for the life of the process; `taskd.torch.init` makes it."""

    def __init__(self, settings: WorkerSettings, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        """As the job was started; they stay when it shrinks. `members` says who is there now."""
        self.members = tuple(range(world_size))
        self.elastic = "accumulate"
        self.step = 0
        """Steps committed."""
        self._settings = settings
        self._beacon = Beacon(settings.beacon)
        self._groups = Groups(world_size, self._on_fault, self._beacon.collectives)
        self._gates = Gates(self)
        self._kept: Protected | None = None
        self._undo: Undo | None = None
        self._roots = random.roots()
        self._link: Link | None = None
        self._incident = settings.incident
        self._holds: int | None = 0
        """The step whose state we hold; None: none, as in a replacement before it is given one."""
        self._gradients_carry = False
        self._buffered: list[Any] = []
        """Models whose buffers we send round in each step."""
        self._is_sharded = False
        self._shard = ""
        self._snapshots: Snapshots | None = None
        self._snapshot_every = 0
        self._keeper: Keeper | None = None
        self._groups_sized_for = world_size
        self._resumed_from: Path | None = None
        self._order: Order | GiveUp | None = None
        """An order that came while we stood inside a step, to be carried out at its end."""
        self._retry_on: tuple[type[Exception], ...] = ()

    @property
    def _kept_now(self) -> Protected:
        assert self._kept is not None
        return self._kept

    # For the script

    def protect(
        self,
        *,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scaler: Any = None,
        retry_on: tuple[type[Exception], ...] = (),
        snapshot_every: int | None = None,
        elastic: str = "accumulate",
        **parts: Stateful | None,
    ) -> None:
        """Say what belongs to the training state.

        `elastic` says what becomes of the parts of ranks that are missing: "accumulate" shares them
        out (`Step.parts`), "scale" leaves them out.
        `snapshot_every`: after so many steps the state is copied to shared memory; 0 is never, and
        None is after each step where a shard would be lost with its rank, else never.
        `parts` are all other things with `state_dict` and `load_state_dict`: the scheduler, the
        data's position, objects of your own. `retry_on` lists exceptions after which the step is
        to be tried again instead of ending the process.
        """
        present = {name: part for name, part in parts.items() if part is not None}
        self._kept = Protected(model, optimizer, scaler, present)
        self._undo = Undo(self._kept)
        self._retry_on = retry_on
        if elastic not in ("accumulate", "scale"):
            raise SettingsError([f"elastic must be accumulate or scale, got {elastic!r}"])
        self.elastic = elastic
        self._roots = random.roots()
        for one in self._kept.optimizers:
            self._gates.hook(one)
        if self._link is None:
            return
        for wrapped in self._kept.reducers():
            buckets.settle(wrapped, self._groups)
            if buffers.take_over(wrapped):
                self._buffered.append(wrapped)
        for one_model in self._kept.models:
            self._gates.watch(one_model)
        self._shard, replica = sharded.describe(self._kept)
        self._is_sharded = self._shard != ""
        self._link.describe(self._shard, replica)
        if snapshot_every is None:
            snapshot_every = 1 if self._is_sharded and not sharded.has_replicas(self._kept) else 0
        if snapshot_every and self._settings.beacon:
            folder = Path(self._settings.beacon).parent
            self._keeper = Keeper(folder, self.rank, self._settings.node_rank)
            self._snapshots = Snapshots(
                folder, self.rank, self._shard, self._kept, self._keeper.send
            )
            self._snapshot_every = snapshot_every

    def steps(self, total: int) -> Iterator[Step]:
        """The steps that are still to do, also in a process that joins in the middle."""
        if self._link is not None and self._kept is None:
            raise SettingsError(["steps() needs protect() first: what is it that steps?"])
        if self._link is not None:
            if self._groups.mode is Mode.ALONE:
                self._mend()
            elif self.step == 0:
                self._resume()
                self._meet_buddy(self._groups.meeting)
                self._snapshot()
        while self.step < total or not self._all_arrived():
            if self._groups.trouble():
                self._mend()
            else:
                random.begin(self._roots, self.step)
                yield Step(self.step, self)
        if self._resumed_from is not None and self.rank == 0:
            dump.use_up(self._resumed_from)
        # What the script does from here on has no pace that anybody could judge it by.
        self._beacon.phase("leaving", self._incident)
        random.begin(self._roots, self.step)

    def _all_arrived(self) -> bool:
        """Nobody leaves before all have committed the last step: a late loss needs a source."""
        if self._link is None:
            return True
        self._groups.enter()
        self._groups.world.barrier().wait()
        self._groups.leave()
        if self._groups.trouble():
            return False
        if self._link.awaited:
            self._link.committed(Committed(self.step))
        return True

    # For the step

    def _begin(self) -> None:
        self._gates.begin()
        if self._link is None:
            return
        assert self._undo is not None
        self._undo.remember(self._gradients_carry)
        self._beacon.phase("training", self._incident)
        self._groups.enter()

    def _share_buffers(self) -> None:
        for model in self._buffered:
            buffers.share(model)

    def _vote(self) -> None:
        """Where a shard has few holders, all agree that the step is good before anybody updates.

        Who gets through knows that all others have arrived with their sums complete. Who does not
        get through can still go either way: it stands here, with its gradients, and offers both the
        step before and the step after, until the plan says which of them the job goes on with.
        """
        if self._snapshots is not None:
            self._snapshots.wait()  # the update would change what is being copied
        if not self._is_sharded or self._link is None:
            return
        self._groups.world.barrier().wait()
        if not self._groups.trouble():
            return
        if len(self._kept_now.optimizers) == 1:
            both = Stood(Committed(self.step + 1), whole=True, undo=True, copies=self._copies())
            self._order = self._stand(both)
            match self._order:
                case Repair(resume=at) | Dump(step=at) if at == self.step + 1:
                    self._gates.finishing = True
                    return
                case _:
                    pass
        raise Abandon

    def _end(self, error: BaseException | None) -> bool:
        if error is None:
            try:
                self._gates.end()
            except Abandon as abandoned:
                error = abandoned
        trouble = self._link is not None and self._groups.trouble()
        self._groups.leave()
        if error is None and (self._gates.updated or not trouble):
            self._commit()
        elif isinstance(error, Abandon) or (trouble and isinstance(error, Exception | None)):
            self._abandon()
        elif self._link is not None and isinstance(error, self._retry_on):
            self._abandon()
            self._link.failed("exception", f"{type(error).__name__}: {error}")
            trouble = True
        else:
            return False
        if trouble or self._groups.trouble():
            self._mend()
        return True

    def _commit(self) -> None:
        self.step += 1
        self._holds = self.step
        self._gradients_carry = not self._gates.updated
        self._snapshot()
        self._beacon.stepped(self.step)
        self._beacon.phase("between steps", self._incident)
        if self._link is not None:
            self._link.step = Committed(self.step)
            if self._link.awaited:
                self._link.committed(Committed(self.step))

    def _abandon(self) -> None:
        if self._gates.updated:
            # The update is done, or half done, and what had to follow it is not: no use to anybody.
            self._holds = None
        if self._undo is not None and self._kept is not None:
            for model in self._kept.models:
                sharded.forget(model)
            self._undo.restore()

    # Mending

    def _on_fault(self, why: str) -> None:
        if self._link is not None:
            self._link.failed("communication", why)

    def _mend(self) -> None:
        """Stand still until the job is whole again. Returns at the step where it goes on."""
        assert self._link is not None
        while True:
            held = self._holds
            order, self._order = self._order, None
            if order is None:
                order = self._stand(
                    Stood(Committed(held or 0), whole=held is not None, copies=self._copies())
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
                    raise NotRepaired(f"{because}; before that: {self._groups.why}")

    def _dump(self, order: Dump) -> None:
        """Write the last checkpoint together with the other survivors."""
        assert self._link is not None
        self._beacon.phase("leaving", order.incident)
        ranks = tuple(sorted(member.rank for member in order.members))
        address, timeout = self._settings.store, timedelta(seconds=DUMP_TIMEOUT_S)
        because = ""
        try:
            if self._holds != order.step:
                raise dump.CannotDump(f"this rank holds step {self._holds}, not {order.step}")
            self._groups.gather(order.incident, address, f"{order.incident}/", timeout, ranks)
            self._groups.open()
            dump.save(self._kept_now, order.step, order.incident, order.directory)
        except Transient as error:
            because = str(error)
        self._link.wrote(Wrote(order.incident, order.step, because))
        self._link.close()

    def _resume(self) -> None:
        """Go on from the last checkpoint of the run before, if there is one that all can see."""
        found = dump.find(self._kept_now, self._settings.dump_dir)
        seen: list[int] = [0] * self.world_size
        dist.all_gather_object(seen, found[1].step if found else 0)
        if found is None or len(set(seen)) > 1:
            if any(seen):
                log.warning("a last checkpoint is not used, since only some ranks see it: %s", seen)
            return
        path, note = found
        dump.load(self._kept_now, path)
        self._resumed_from = path
        self.step = self._holds = note.step
        log.info("going on at step %d, from %s", note.step, path)

    def _admit(self, members: tuple[int, ...]) -> None:
        """The job may have another size now."""
        if len(members) != self._groups_sized_for:
            for wrapped in self._kept_now.reducers():
                buckets.renew(wrapped, self._groups)
            self._groups_sized_for = len(members)
        self.members = members

    def _parts(self) -> list[int]:
        """The parts of a batch that fall to this rank: its own, and its share of the orphans."""
        orphans = [rank for rank in range(self.world_size) if rank not in self.members]
        if self.elastic == "scale":
            orphans = []
        place = self.members.index(self.rank)
        return [self.rank, *orphans[place :: len(self.members)]]

    def _holding(self) -> Holding:
        return Holding(self.rank, self._shard, self._holds, self._kept_now, self._snapshots)

    def _copies(self) -> tuple[Copy, ...]:
        if self._snapshots is None:
            return ()
        self._snapshots.wait()
        return self._snapshots.copies()

    def _meet_buddy(self, meeting: Meeting) -> None:
        if self._keeper is None:
            return
        self._keeper.announce(meeting)
        if not self._keeper.choose(meeting, list(self._groups.world.shape.ranks)):
            log.info("snapshots have no second copy: all ranks are on one node")

    def _snapshot(self) -> None:
        if self._snapshots is not None and self.step % self._snapshot_every == 0:
            self._snapshots.begin(self.step, self._incident)

    def _stand(self, stood: Stood) -> Order | GiveUp:
        assert self._link is not None
        self._beacon.phase("parked", self._incident)
        return self._link.stand(stood)

    def _repaired(self, plan: Repair) -> bool:
        assert self._link is not None
        if self._snapshots is not None:
            self._snapshots.wait()
        self._incident = plan.incident
        self._beacon.phase("repairing", plan.incident)
        try:
            mended = repair.carry_out(
                plan, self._holding(), self._groups, self._settings.store, self._meet_buddy
            )
        except Transient as error:
            self._link.broke(plan.incident, str(error))
            return False
        self.step = self._holds = plan.resume
        self._admit(tuple(sorted(member.rank for member in plan.members)))
        self._snapshot()
        self._link.step = Committed(self.step)
        self._beacon.stepped(self.step)
        self._beacon.phase("between steps", plan.incident)
        self._link.mended(mended)
        return True


def init(backend: str | None = None, timeout: timedelta = TIMEOUT) -> Job:
    """Join the job. Without one, or without any launcher, training is simply not protected."""
    settings = config.load(WorkerSettings)
    rank = int(config.environ.get("RANK", "0"))
    world_size = int(config.environ.get("WORLD_SIZE", "1"))
    job = Job(settings, rank, world_size)
    if settings.proxy:
        _join(job, settings, backend, timeout)
    elif world_size > 1:
        dist.init_process_group(backend, timeout=timeout)
    return job


def _join(job: Job, settings: WorkerSettings, backend: str | None, timeout: timedelta) -> None:
    seam.check()
    address = settings.store or "{MASTER_ADDR}:{MASTER_PORT}".format_map(dict(config.environ))
    attempt = config.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    begun = f"attempt/{attempt}/begun"
    host, _, port = address.rpartition(":")
    store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False)
    joining = store.check([begun])
    me = Me(
        Rank(job.rank), NodeRank(settings.node_rank), Incarnation(settings.incarnation), os.getpid()
    )
    groups = job._groups
    job._link = Link(settings, me, joining, groups.abort)
    backends = transport.choose(backend)
    group.register(groups, backends)
    nics = nic.setup(settings)
    if nics.failover:
        nics.watch(job._on_fault)
    operations.offer(settings, job.rank, address, backends, lambda: job.members)
    if joining:
        job._holds = None
    else:
        groups.meet(settings.incident, address, f"start/{attempt}/", timeout)
        groups.open()
    dist.init_process_group(
        group.BACKEND,
        store=groups.store,
        rank=job.rank,
        world_size=job.world_size,
        timeout=timeout,
    )
    if not joining:
        store.set(begun, "1")
