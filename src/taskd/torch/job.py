"""A training job as the script sees it: protect, step.

`joining.py` makes it, with as much behind it as there is: a manager and resilient groups, or
nothing at all. The steps are the same in all cases, so a script needs no second version. What has
to be done about a fault is in `mending.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from taskd import config
from taskd.errors import SettingsError
from taskd.model.faults import FaultCause
from taskd.model.ids import Step as Committed
from taskd.runtime.beacon import Beacon
from taskd.torch import random_state as random
from taskd.torch.copies.copy_schedule import Copying
from taskd.torch.groups import ddp_buckets as buckets
from taskd.torch.groups import ddp_buffers as buffers
from taskd.torch.groups.all_groups import Groups, Mode
from taskd.torch.guard import Corrupt, Guard
from taskd.torch.recovery import Mending
from taskd.torch.state import emergency_checkpoint as dump
from taskd.torch.state import sharded
from taskd.torch.state.protected import Protected, Stateful
from taskd.torch.state.undo import Undo
from taskd.torch.step import Abandon, Gates, Step
from taskd.worker.manager_connection import ManagerConnection
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


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
        self._link: ManagerConnection | None = None
        """Our line to the manager, and what is done with its orders: both are there, or none."""
        self._mending: Mending | None = None
        self._incident = settings.incident
        self._holds: int | None = 0
        """The step whose state we hold; None: none, as in a replacement before it is given one."""
        self._gradients_carry = False
        self._exchanges: list[buffers.Exchange] = []
        self._is_sharded = False
        self._shard = ""
        self._copying = Copying(Path(settings.beacon).parent if settings.beacon else None)
        self._guard: Guard | None = None
        self._stepping = False
        self._resumed_from: Path | None = None
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
        guard_every: int = 0,
        **parts: Stateful | None,
    ) -> None:
        """Say what belongs to the training state.

        `elastic` says what becomes of the parts of ranks that are missing: "accumulate" shares them
        out (`Step.parts`), "scale" leaves them out.
        `snapshot_every`: after so many steps the state is copied to shared memory; 0 is never, and
        None is after each step where a shard would be lost with its rank, else never.
        `guard_every`: in every so many steps the replicas compare their state, bit by bit, and one
        that differs from the others is repaired; 0 is never.
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
            if (exchange := buffers.take_over(wrapped)) is not None:
                self._exchanges.append(exchange)
        for one_model in self._kept.models:
            self._gates.watch(one_model)
        sharded.check(self._kept)
        self._shard, replica = sharded.describe(self._kept)
        self._is_sharded = self._shard != ""
        self._link.shard_known(self._shard, replica)
        if guard_every and self._is_sharded and not sharded.has_replicas(self._kept):
            log.warning("guard_every has no effect: no shard has a replica to be compared with")
        elif guard_every:
            self._guard = Guard(guard_every, self._shard, self._kept, self._groups)
        if snapshot_every is None:
            snapshot_every = 1 if self._is_sharded and not self._outlives_a_node(self._kept) else 0
        if snapshot_every:
            node = self._settings.node_rank
            self._copying.start(snapshot_every, self.rank, node, self._shard, self._kept)

    def _outlives_a_node(self, kept: Protected) -> bool:
        """Whether replicas are enough. They are not if they are all on one node of several."""
        per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        safe = sharded.outlives_a_node(kept, self.world_size, per_node)
        if not safe and sharded.has_replicas(kept) and self.rank % per_node == 0:
            log.warning("all replicas of a shard are on this node: copies go to another node")
        return safe

    def steps(self, total: int, start: int = 0) -> Iterator[Step]:
        """The steps that are still to do, also in a process that joins in the middle.

        `start`: how many are done already, in a state that the script has loaded by itself. A last
        checkpoint of the run before (`dump`) that is further than that is gone on from instead.
        """
        if self._mending is not None and self._kept is None:
            raise SettingsError(["steps() needs protect() first: what is it that steps?"])
        if self._mending is None:
            self.step = max(self.step, start)
        else:
            self._groups.setup.end()
            if self._groups.mode is Mode.ALONE:
                self._mending.mend()
            elif not self._stepping:
                self._begin_at(start)
                self._mending.meet_buddy(self._groups.meeting)
                self._copying.committed(self.step, self._incident)
        self._stepping = True
        while self.step < total or not self._all_arrived():
            if self._mending is not None and self._in_trouble():
                self._mending.mend()
            else:
                random.begin(self._roots, self.step)
                yield Step(self.step, self)
        if self._resumed_from is not None and self.rank == 0:
            dump.use_up(self._resumed_from)
        # What the script does from here on has no pace that anybody could judge it by.
        self._beacon.phase("leaving", self._incident)
        random.begin(self._roots, self.step)

    def _begin_at(self, start: int) -> None:
        """Where all begin: at the script's own start, or at a last checkpoint that is further."""
        found = dump.find(self._kept_now, self._settings.dump_dir, start)
        places: list[tuple[int, int]] = [(0, 0)] * self.world_size
        dist.all_gather_object(places, (start, found[1].step if found else 0))
        starts, dumps = zip(*places, strict=True)
        if len(set(starts)) > 1:
            raise SettingsError([f"steps(start=…) must be the same on all ranks, got {starts}"])
        if found is not None and len(set(dumps)) == 1:
            self._resumed_from, start = found[0], found[1].step
            dump.load(self._kept_now, self._resumed_from)
            log.info("going on at step %d, from %s", start, self._resumed_from)
        elif any(dumps):
            log.warning("a last checkpoint is not used, since only some ranks see it: %s", dumps)
        self.step = self._holds = start
        if self._link is not None:
            self._link.step = Committed(start)

    def _all_arrived(self) -> bool:
        """Nobody leaves before all have committed the last step: a late loss needs a source."""
        if self._link is None:
            return True
        self._groups.enter()
        try:
            if self._guard is None:
                self._groups.arrive()
            else:
                self._compare(self._guard)
        except Abandon:
            pass
        self._groups.leave()
        if self._in_trouble():
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
        for exchange in self._exchanges:
            exchange.make()

    def _compare(self, guard: Guard) -> None:
        """Leave the step if the replicas do not hold the same bits, and see that they do again."""
        verdict = guard.compare(self.step)
        if verdict is not None and not verdict.named:
            return
        if verdict is not None:
            guard.found = verdict
            self._copying.distrust(verdict.named, verdict.agreed)
            if self.rank in verdict.named:
                self._holds = None
            # Whoever speaks ends the step, and who has not heard the others by then would go on
            # holding what may be wrong. So nobody speaks before all have heard.
            self._groups.arrive()
            if self.rank in verdict.named:
                self._declare_corrupt(f"at step {self.step} {verdict.because}")
            else:
                # They have said so, and do not come here. We go on when we are told to park.
                self._groups.arrive()
        raise Abandon

    def _declare_corrupt(self, evidence: str) -> None:
        self._holds = None
        if self._link is not None:
            self._link.step_failed(FaultCause.CORRUPT, evidence)

    def _in_trouble(self) -> bool:
        return self._groups.trouble() or self._holds is None

    def _vote(self) -> None:
        """Where a shard has few holders, all agree that the step is good before anybody updates.

        Who gets through knows that all others have arrived with their sums complete. Who does not
        get through can still go either way: it stands here, with its gradients, and offers both the
        step before and the step after, until the plan says which of them the job goes on with.
        """
        self._copying.wait()  # the update would change what is being copied
        if not self._is_sharded or self._mending is None:
            return
        self._groups.arrive()
        if not self._groups.trouble():
            return
        if len(self._kept_now.optimizers) == 1 and self._mending.may_finish():
            self._gates.finishing = True
            return
        raise Abandon

    def _end(self, error: BaseException | None) -> bool:
        if error is None:
            try:
                self._gates.end()
            except Abandon as abandoned:
                error = abandoned
        trouble = self._groups.leave() and self._link is not None
        if error is None and (self._gates.updated or not trouble):
            self._commit()
        elif self._link is not None and isinstance(error, Corrupt):
            self._abandon()
            self._declare_corrupt(str(error))
        elif isinstance(error, Abandon) or (trouble and isinstance(error, Exception | None)):
            self._abandon()
        elif self._link is not None and isinstance(error, self._retry_on):
            self._abandon()
            self._link.step_failed(FaultCause.EXCEPTION, f"{type(error).__name__}: {error}")
            trouble = True
        else:
            return False
        if self._mending is not None and (trouble or self._in_trouble()):
            self._mending.mend()
        return True

    def _commit(self) -> None:
        self.step += 1
        self._holds = self.step
        self._gradients_carry = not self._gates.updated
        self._copying.committed(self.step, self._incident)
        self._beacon.stepped(self.step)
        self._beacon.phase("between steps", self._incident)
        if self._link is not None:
            self._link.step = Committed(self.step)
            if self._link.awaited:
                self._link.committed(Committed(self.step))

    def _abandon(self) -> None:
        if self._gates.updating:
            # The update is done, or half done, and what had to follow it is not: no use to anybody.
            self._holds = None
        if self._undo is not None and self._kept is not None:
            for model in self._kept.models:
                sharded.forget(model)
            self._undo.restore()

    def _on_fault(self, why: str) -> None:
        if self._link is not None:
            self._link.step_failed(FaultCause.COMMUNICATION, why)

    def _parts(self) -> list[int]:
        """The parts of a batch that fall to this rank: its own, and its share of the orphans."""
        orphans = [rank for rank in range(self.world_size) if rank not in self.members]
        if self.elastic == "scale":
            orphans = []
        place = self.members.index(self.rank)
        return [self.rank, *orphans[place :: len(self.members)]]
