"""A training job as the script sees it: `protect` what belongs to the state, and run `steps`.

`init.py` creates it, with as much behind it as there is: a manager and resilient groups, plain
groups, or nothing. The steps are the same in all cases, so a script needs no second version. What
happens around a step is in `step_cycle.py`, what happens after a fault in `recovery.py`.
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
from taskd.model.ids import Step as CommittedStep
from taskd.torch import random_state
from taskd.torch.context import JobContext
from taskd.torch.groups import ddp_buckets, ddp_buffers
from taskd.torch.groups.all_groups import Mode
from taskd.torch.guard import Guard
from taskd.torch.recovery import Recovery
from taskd.torch.state import emergency_checkpoint, sharded
from taskd.torch.state.protected import Protected, Stateful
from taskd.torch.step import Step
from taskd.torch.step_cycle import Abandon, StepCycle

log = logging.getLogger(__name__)

ELASTIC = ("accumulate", "scale")


class Job:
    """One training job, seen from one of its processes.

    [`taskd.torch.init`][taskd.torch.init] creates it; a process has one. Call
    [`protect`][taskd.torch.Job.protect] once, after the model and the optimizer exist, and then
    train in a loop over [`steps`][taskd.torch.Job.steps].

    Example:
        ```python
        import taskd.torch as taskd

        job = taskd.init()
        model = DDP(build_model())
        optimizer = torch.optim.AdamW(model.parameters())
        job.protect(model=model, optimizer=optimizer)

        for step in job.steps(10_000):
            with step:
                optimizer.zero_grad()
                loss_fn(model(batch(step))).backward()
                optimizer.step()
        ```
    """

    def __init__(self, context: JobContext, recovery: Recovery | None = None) -> None:
        self._context, self._recovery = context, recovery
        self._cycle = StepCycle(context, recovery)
        self._base_seeds = random_state.capture()
        self._has_started = False
        self._resumed_from: Path | None = None

    @property
    def rank(self) -> int:
        """The rank of this process, as the job was started. It does not change when ranks leave."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks with which the job was started. `members` are those it has now."""
        return self._context.world_size

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are in the job now. Fewer than `world_size` while a node is missing."""
        return self._context.members

    @property
    def elastic(self) -> str:
        """What happens to the parts of missing ranks: "accumulate" or "scale"."""
        return self._context.elastic

    @property
    def step(self) -> int:
        """How many steps are committed."""
        return self._context.step

    @property
    def incident(self) -> int:
        """The number of the last incident that was repaired; it grows by one with each."""
        return self._context.incident

    @property
    def is_replacement(self) -> bool:
        """True in a process that has joined a running job, in place of one that was lost.

        Such a process runs the script from its
        first line, alone, and receives the protected state from a peer when it calls `steps`. So
        a script can skip what is not needed for that:

        Example:
            ```python
            if not job.is_replacement:
                download_pretrained_weights(model)
            ```
        """
        return self._context.is_replacement

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
        """Declare what belongs to the training state.

        Everything that changes from step to step has to be named here: after a fault, an abandoned
        step is undone, and a replacement receives exactly this state from a healthy rank. Random
        numbers need no entry: torch, CUDA, Python and NumPy are seeded per step.

        Call it once, on all ranks, after the model is wrapped (DDP, `fully_shard`, …) and the
        optimizer exists, and before `steps`.

        Args:
            model: The model or models: plain, DDP, FSDP2, HSDP or other distributed tensors.
            optimizer: The optimizer or optimizers. All their parameters must belong to `model`.
            scaler: A `torch.amp.GradScaler`, or several.
            retry_on: Exceptions after which a step is tried again instead of ending the process,
                for example `(OSError,)` for a file system that is sometimes unavailable.
            snapshot_every: Copy the state to shared memory after every so many steps, so that it
                outlives the process. 0: never. None: after each step where a shard would be lost
                with its rank or node, or where several optimizers update one after the other;
                otherwise never.
            elastic: What happens to the parts of a batch that belong to missing ranks.
                "accumulate": the remaining ranks compute them as well, the result is that of the
                complete batch (see `Step.parts`). "scale": they are left out.
            guard_every: In every so many steps the replicas compare their weights and optimizer
                state, bit by bit; a rank that differs is repaired. 0: never.
            **parts: Everything else with `state_dict` and `load_state_dict`: the learning-rate
                scheduler, the data loader's position, your own objects. None is ignored.

        Raises:
            SettingsError: An argument is wrong, or the model or optimizer cannot be protected
                (`DDP(static_graph=True)`, `ZeroRedundancyOptimizer`). The message lists every
                problem.
            UnknownTorch: The model is sharded, and the installed torch cannot undo a step of it.

        Example:
            ```python
            job.protect(
                model=model,
                optimizer=optimizer,
                scaler=scaler,
                scheduler=scheduler,
                sampler=sampler,
                guard_every=100,
            )
            ```
        """
        context = self._context
        if elastic not in ELASTIC:
            raise SettingsError([f"unknown elastic={elastic!r} (expected accumulate or scale)"])
        present = {name: part for name, part in parts.items() if part is not None}
        protected = context.protected = Protected(model, optimizer, scaler, present)
        context.elastic = elastic
        self._base_seeds = random_state.capture()
        if context.manager is None:
            self._cycle.watch([], retry_on)
            return
        exchanges = []
        for wrapped in protected.ddp_models():
            ddp_buckets.rebuild_early(wrapped, context.groups)
            if (exchange := ddp_buffers.take_over(wrapped)) is not None:
                exchanges.append(exchange)
        self._cycle.watch(exchanges, retry_on)
        sharded.check(protected, with_checkpoint=context.held_step is not None)
        context.shard, replica = sharded.describe(protected)
        context.manager.shard_known(context.shard, replica)
        if guard_every and context.shard and not sharded.has_replicas(protected):
            log.warning("guard_every has no effect: no shard has a replica to compare it with")
        elif guard_every:
            context.guard = Guard(guard_every, context.shard, protected, context.groups)
        if snapshot_every is None:
            snapshot_every = 1 if self._needs_snapshots() else 0
        if snapshot_every:
            node = context.settings.node_rank
            context.copies.start(snapshot_every, self.rank, node, context.shard, protected)

    def _needs_snapshots(self) -> bool:
        """Whether a fault could leave the job without a complete state of any step.

        Between the updates of two optimizers, all ranks are halfway between two steps at once.
        """
        context = self._context
        if len(context.protected.optimizers) > 1:
            return True
        return context.shard != "" and not self._survives_node_loss()

    def _survives_node_loss(self) -> bool:
        """Whether replicas are enough. They are not if they are all on one node of several."""
        protected = self._context.protected
        per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        survives = sharded.survives_node_loss(protected, self.world_size, per_node)
        if not survives and sharded.has_replicas(protected) and self.rank % per_node == 0:
            log.warning(
                "all replicas of a shard are on this node: snapshots are copied to another node"
            )
        return survives

    def steps(self, total: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps that are still to do.

        In a process that joins later (a replacement), the first step is the one at which the job
        resumes; its state has then been received from a peer. After a fault the abandoned step is
        yielded again. When the iterator ends, all ranks have committed the last step.

        Args:
            total: How many steps the training has.
            start: How many steps are already done in the state that the script has loaded from its
                own checkpoint. The same on all ranks. If the last run of this job has left an
                emergency checkpoint of a later step, that one is loaded instead.

        Yields:
            Each step, to be used as `with step:`.

        Raises:
            SettingsError: `protect` was not called, or `start` differs between ranks.
            NotRepaired: A fault could not be repaired inside the process.

        Example:
            ```python
            start = load_checkpoint(model, optimizer) if resume else 0
            for step in job.steps(10_000, start):
                with step:
                    train_one_step(model, optimizer, step)
                if step % 1000 == 999 and job.rank == 0:
                    save_checkpoint(model, optimizer, step + 1)
            ```
        """
        context, recovery = self._context, self._recovery
        if recovery is not None and not context.is_protected:
            raise SettingsError(["steps() was called before protect(): call protect() first"])
        if recovery is None:
            context.step = max(context.step, start)
        else:
            context.groups.setup.stop()
            if context.groups.mode is Mode.SOLO:
                recovery.run()
            elif not self._has_started:
                self._start_at(start)
                recovery.choose_buddy()
                context.copies.on_commit(context.step, context.incident)
        self._has_started = True
        while context.step < total or not self._all_finished():
            if recovery is not None and context.needs_recovery():
                recovery.run()
            else:
                random_state.seed_step(self._base_seeds, context.step)
                yield Step(context.step, self._cycle)
        if self._resumed_from is not None and self.rank == 0:
            emergency_checkpoint.mark_used(self._resumed_from)
        # What the script does from here on has no pace by which it could be judged.
        context.beacon.phase("leaving", context.incident)
        random_state.seed_step(self._base_seeds, context.step)

    def _start_at(self, start: int) -> None:
        """All ranks start at the script's own start, or at an emergency checkpoint beyond it."""
        context = self._context
        directory = context.settings.dump_dir
        found = emergency_checkpoint.find(context.protected, directory, start)
        gathered: list[tuple[int, int]] = [(0, 0)] * self.world_size
        dist.all_gather_object(gathered, (start, found[1].step if found else 0))
        starts, checkpoints = zip(*gathered, strict=True)
        if len(set(starts)) > 1:
            raise SettingsError([f"steps(start=…) must be the same on all ranks, got {starts}"])
        if found is not None and len(set(checkpoints)) == 1:
            self._resumed_from, start = found[0], found[1].step
            emergency_checkpoint.load(context.protected, self._resumed_from)
            log.info("resuming at step %d from %s", start, self._resumed_from)
        elif any(checkpoints):
            log.warning(
                "emergency checkpoint is not used, because not all ranks see the same one: "
                "steps=%s (0: none)",
                checkpoints,
            )
        context.step = context.held_step = start
        if context.manager is not None:
            context.manager.step = CommittedStep(start)

    def _all_finished(self) -> bool:
        """No rank leaves before all have committed the last step: a late loss needs a source."""
        context = self._context
        if context.manager is None:
            return True
        context.groups.enter_step()
        try:
            if context.guard is None:
                context.groups.barrier()
            else:
                self._cycle.compare_replicas(context.guard)
        except Abandon:
            pass
        context.groups.leave_step()
        if context.needs_recovery():
            return False
        if context.manager.awaited:
            context.manager.committed(CommittedStep(context.step))
        return True
