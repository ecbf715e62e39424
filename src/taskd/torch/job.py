"""A training job as the script sees it: `protect` what belongs to the state, and run `steps`.

`init.py` creates it, with as much behind it as there is: a manager and resilient groups, plain
groups, or nothing. The steps are the same in all cases, so a script needs no second version. What
happens around a step is in `step_cycle.py`, what happens after a fault in `recovery.py`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.distributed import Store
from torch.optim import Optimizer

from taskd.core.worker import gradient_vote
from taskd.errors import SettingsError
from taskd.model.ids import Step as CommittedStep
from taskd.runtime.files import checkpoint_folders
from taskd.torch import compat, random_state
from taskd.torch.checkpoints import emergency_checkpoint
from taskd.torch.context import JobContext
from taskd.torch.copies import final_state
from taskd.torch.data.batch_feed import open_feed
from taskd.torch.groups import ddp_buckets, ddp_buffers, ddp_hook_state, sealed_objects
from taskd.torch.groups.all_groups import Mode
from taskd.torch.loop import loop_variables, refused_loops
from taskd.torch.loop.framework_loop import FrameworkLoop
from taskd.torch.loop.section import Section
from taskd.torch.recovery import Recovery
from taskd.torch.replicas.comparison import Comparison
from taskd.torch.replicas.guard import Guard
from taskd.torch.state import sharded
from taskd.torch.state.protected import Protected, Stateful
from taskd.torch.step import Step
from taskd.torch.step_cycle import Abandon, StepCycle
from taskd.torch.verify import verification
from taskd.torch.verify.verification import Verification

log = logging.getLogger(__name__)

T = TypeVar("T")
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
            for attempt in step:
                with attempt:
                    optimizer.zero_grad()
                    loss_fn(model(batch(step))).backward()
                    optimizer.step()
        ```
    """

    def __init__(self, context: JobContext, recovery: Recovery | None = None) -> None:
        self._context, self._recovery = context, recovery
        self._cycle = StepCycle(context, recovery)
        self._has_started = False
        self._finished: int | None = None
        """How many steps the last loop had, if it has ended by itself."""
        self._resumed_from: Path | None = None
        self._iterator: Iterator[Any] | None = None
        """What the script iterates over, until it has begun. It must not outlive the loop."""

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
        verify_every: int = 0,
        **parts: Stateful | None,
    ) -> None:
        """Declare what belongs to the training state.

        Name every object with a state that steps change: what an abandoned step changes in it is
        undone, and a replacement receives its state from a healthy rank. Random numbers
        need no entry: torch, CUDA, Python and NumPy are seeded per step. Plain variables of
        the loop, and lists and dictionaries of them, are kept without an entry.

        Call it once, on all ranks, after the model is wrapped (DDP, `fully_shard`, …) and the
        optimizer exists, and before `steps`.

        Args:
            model: The model or models: plain, DDP, FSDP2, HSDP or other distributed tensors.
            optimizer: The optimizer or optimizers. All their parameters must belong to `model`.
            scaler: A `torch.amp.GradScaler`, or several.
            retry_on: Exceptions after which a step is tried again instead of ending the process,
                for example `(OSError,)` for a file system that is sometimes unavailable.
            snapshot_every: Copy the state to shared memory after every so many steps, so that it
                outlives the process. 0: never. None: where a shard would be lost with its rank or
                node, or where several optimizers update one after the other; otherwise never.
                With None, a state of 64 MB or more per rank is copied as often as possible without
                making steps more than 5 % longer, a smaller one after each step.
            elastic: What happens to the parts of a batch that belong to missing ranks.
                "accumulate": the remaining ranks compute them as well, the result is that of the
                complete batch (see `Step.parts`). "scale": they are left out.
            guard_every: In every so many steps the replicas compare their weights and optimizer
                state, bit by bit; a rank that differs is repaired. 0: never.
            verify_every: In every so many steps each rank computes the gradients of another rank's
                batch, too; a rank whose device computes wrong gradients is replaced. The script
                has to pass its batches to [`Step.verified`][taskd.torch.Step.verified], and to
                call `torch.use_deterministic_algorithms(True)`. For replicas (DDP) on at least
                three ranks. 0: never.
            **parts: Everything else with `state_dict` and `load_state_dict`: the learning-rate
                scheduler, the data loader's position, your own objects. None is ignored. Where the
                state of a part differs between ranks, each rank gets back its own.

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
        if context.is_protected:
            raise refused_loops.protected_twice()
        if elastic not in ELASTIC:
            raise SettingsError([f"unknown elastic={elastic!r} (expected accumulate or scale)"])
        if verify_every < 0:
            raise SettingsError([f"invalid verify_every={verify_every} (expected 0 or more)"])
        present = {name: part for name, part in parts.items() if part is not None}
        if context.manager is not None:
            present[loop_variables.PART] = context.variables
            models = [model] if isinstance(model, nn.Module) else model
            present |= ddp_hook_state.parts_of(models, parts.values())
        protected = context.protected = Protected(model, optimizer, scaler, present)
        if verify_every and (problems := verification.problems(protected)):
            raise SettingsError(problems)
        context.variables.objects.leave_to_others(*protected.objects())
        context.variables.objects.add_optimizers(protected.optimizers)
        context.variables.objects.add_models(protected.models)
        context.elastic = elastic
        context.base_seeds = self._seeds()
        if context.manager is None:
            self._cycle.watch([], retry_on)
            return
        exchanges = []
        for wrapped in protected.ddp_models():
            ddp_buckets.rebuild_early(wrapped, context.groups)
            if (exchange := ddp_buffers.take_over(wrapped)) is not None:
                exchanges.append(exchange)
        self._cycle.watch(exchanges, retry_on)
        compat.check_pipelines()
        sharded.check(protected, with_checkpoint=context.held_step is not None)
        context.copies.attach(self.rank, context.settings.node_rank, protected)
        context.comparison = Comparison(context, snapshot_every)
        context.manager.shard_known(context.shard, context.replica)
        if guard_every and context.shard and not sharded.has_replicas(protected):
            log.warning("guard_every has no effect: no shard has a replica to compare it with")
        elif guard_every:
            context.guard = Guard(guard_every, lambda: context.shard, protected, context.groups)
        if verify_every and self.world_size < gradient_vote.FEWEST:
            log.warning(
                "verify_every has no effect: %d ranks are needed to say which one is wrong",
                gradient_vote.FEWEST,
            )
        elif verify_every and self._cycle.undo is not None:
            context.verification = Verification(verify_every, context, self._cycle.undo)

    def _seeds(self) -> random_state.BaseSeeds:
        """Those of the predecessor. The script of a replacement may have come here in another way:
        by now there can be a checkpoint to load, with the state of the generators in it."""
        context = self._context
        kept = context.kept_seeds.of_step(0) if context.is_replacement else None
        seeds = random_state.BaseSeeds(**kept) if kept else random_state.capture()
        context.kept_seeds.save(0, asdict(seeds))
        return seeds

    def steps(self, total: int, start: int = 0) -> Iterator[Step]:
        """Yield the steps that are still to do.

        In a process that joins later (a replacement), the first step is the one at which the job
        resumes; its state has then been received from a peer. When the iterator ends, all ranks
        have committed the last step.

        Args:
            total: How many steps the training has.
            start: How many steps are already done in the state that the script has loaded from its
                own checkpoint. The same on all ranks. If the last run of this job has left an
                emergency or continuous checkpoint of a later step, that one is loaded instead.

        Yields:
            Each step, to be used as `for attempt in step: with attempt: …`.

        Raises:
            SettingsError: `protect` was not called, `start` differs between ranks, or an earlier
                loop has already done all these steps.
            NotRepaired: A fault could not be repaired inside the process.

        Example:
            ```python
            start = load_checkpoint(model, optimizer) if resume else 0
            for step in job.steps(10_000, start):
                for attempt in step:
                    with attempt:
                        train_one_step(model, optimizer, step)
                if step % 1000 == 999 and job.rank == 0:
                    save_checkpoint(model, optimizer, step + 1)
            ```
        """
        self._context.beacon.total(total)
        self._iterator = self._steps_while(lambda step: step < total, start, total)
        return self._iterator

    def batches(
        self,
        loader: Iterable[T],
        *,
        epochs: int | None = 1,
        steps: int | None = None,
        start: int = 0,
    ) -> Iterator[tuple[Step, T]]:
        """Yield each step that is still to do, with its batch.

        It replaces the loops over epochs and batches. The batch of a step that is repeated is the
        same again. A replacement continues at the position of its own rank: the position follows
        from the number of the step. What the loader, its dataset, its samplers and its workers draw
        at random belongs to the batch, so batches are the same whether or not a rank was replaced.

        The loader itself is not iterated: a `DataLoader` is built again with the same dataset,
        sampler and workers. `set_epoch` of the sampler and the dataset is called for you. An
        iterable dataset is read from the start of the epoch in a replacement.

        All ranks have the same number of steps: an epoch ends when the first rank has no more data.

        Args:
            loader: A `DataLoader`, torchdata's `StatefulDataLoader`, or any other iterable of
                batches that can be iterated again. Do not give it to `protect`.
            epochs: How often to iterate over it. None: until `steps` are done, or the script
                leaves the loop.
            steps: The most steps to do, over all epochs. None: no limit.
            start: As in `steps`.

        Yields:
            Each step, to be used as in `steps`, and its batch. `Step.epoch` and `Step.ends_epoch`
            tell where it is in its epoch.

        Raises:
            SettingsError: The loader cannot be used, `protect` was not called, or `start` differs
                between ranks.
            NotRepaired: A fault could not be repaired inside the process.

        Example:
            ```python
            for step, (images, labels) in job.batches(loader, epochs=90):
                for attempt in step:
                    with attempt:
                        optimizer.zero_grad()
                        loss_fn(model(images), labels).backward()
                        optimizer.step()
                if step.ends_epoch:
                    evaluate(model)
            ```
        """
        self._iterator = self._batches(loader, epochs, steps, start)
        return self._iterator

    def _batches(
        self, loader: Iterable[T], epochs: int | None, steps: int | None, start: int
    ) -> Iterator[tuple[Step, T]]:
        if self._has_started:
            raise SettingsError(
                ["batches() was called after steps or batches: pass the number of epochs to one"]
            )
        if not self._context.is_protected:
            raise SettingsError(["batches() was called before protect(): call protect() first"])
        feed = self._cycle.feed = open_feed(loader, epochs, self._context, self._store)
        self._context.variables.objects.leave_to_others(loader)
        try:
            for step in self._steps_while(
                lambda number: (steps is None or number < steps) and feed.has(number), start
            ):
                yield step, feed.batch(step)
        finally:
            feed.close()

    def framework_loop(
        self, loader: Iterable[Any] | None, total: Callable[[], int], start: int
    ) -> FrameworkLoop:
        """For adapters: the steps of a loop that belongs to a framework.

        Call it after `protect`. A replacement has joined the other ranks when it returns.

        Args:
            loader: As in `batches`. None: the adapter keeps the batches of a step by itself.
            total: As in `steps`, but asked for whenever it is needed. The number belongs to a
                protected part: the training may end early, and a replacement has to know.
            start: As in `steps`.
        """
        self._context.variables.switch_off()
        self._context.beacon.total(total())
        feed = None
        if loader is not None:
            feed = open_feed(loader, None, self._context, self._store)
        steps = self._steps_while(lambda number: number < total(), start)
        return FrameworkLoop(steps, total, start, self._cycle, self._context, feed, self.section)

    def _store(self) -> Store | None:
        """Where the ranks of this job can leave small things for each other."""
        if self._recovery is not None:
            return self._recovery.store
        return compat.default_store() if self.world_size > 1 else None

    def _steps_while(
        self, has_more: Callable[[int], bool], start: int, total: int | None = None
    ) -> Iterator[Step]:
        context, recovery, position = self._context, self._recovery, self._context.position
        iterator, self._iterator = self._iterator, None
        has_predecessor = False
        if total is not None and self._finished is not None and 0 < total <= self._finished:
            raise refused_loops.nothing_left(total, self._finished)
        if recovery is not None and not context.is_protected:
            raise SettingsError(["steps() was called before protect(): call protect() first"])
        if recovery is not None:
            self._check_hooks()
        if recovery is None:
            context.step = max(context.step, start)
        else:
            context.groups.setup.stop()
            context.variables.bind()
            joins = context.groups.mode is Mode.SOLO
            if joins:
                recovery.run()
            if joins or (not self._has_started and position.is_beyond_setup):
                self._join_turn()
                has_predecessor = True
            elif not self._has_started:
                self._refuse_counters(iterator)
                has_predecessor = self._start_at(start)
                recovery.choose_buddy()
                context.copies.on_commit(context.step, context.incident)
        self._has_started, iterator = True, None
        number = position.next_turn(context.step)
        while has_more(number) or not self._all_finished(number if total is None else total):
            is_broken = recovery is not None and context.needs_recovery()
            if self._cycle.by_attempts or not is_broken:
                self._cycle.begin_turn(number)  # what the last one exchanged need not be repeated
            if recovery is not None and is_broken:
                recovery.run()
                number = self._next_number(number)
                continue
            self._begin_turn(number, has_predecessor)
            has_predecessor = False
            if recovery is not None and number == context.step:
                context.copies.checkpoints.begin_turn(
                    number, context.incident, context.members, context.votes
                )
            random_state.seed_step(context.base_seeds, number)
            yield Step(number, self._cycle)
            number = self._next_number(number + 1)
        if has_predecessor:
            context.variables.end(context.values_after(number - 1))
        self._begin_turn(number, has_predecessor)  # what came after the attempts is newer
        position.end_turns(number if total is None else total)
        if self.rank == 0:
            self._mark_used()
        # What the script does from here on has no pace by which it could be judged.
        context.beacon.phase("leaving", context.incident)
        context.is_over, self._finished = True, number if total is None else total
        if context.manager is not None:
            final_state.keep(context)
        context.variables.leave()
        random_state.seed_step(context.base_seeds, context.step)

    def _refuse_counters(self, iterator: Iterator[Any] | None) -> None:
        """A replacement enters the loop in the middle."""
        names = [] if iterator is None else self._context.variables.counters(iterator)
        if names:
            raise refused_loops.counters(names)

    def _check_hooks(self) -> None:
        protected = self._context.protected
        hooks = ddp_hook_state.parts_of(protected.models, protected.parts.values())
        if late := sorted(hooks.keys() - protected.parts.keys()):
            raise SettingsError(
                [
                    f"the {name} is not protected: register the hook before protect()"
                    for name in late
                ]
            )

    def _begin_turn(self, number: int, joins: bool) -> None:
        if self._recovery is not None:
            self._context.variables.begin_turn(number, joins)

    def _mark_used(self) -> None:
        """No start resumes from this job's checkpoints again.

        If it writes continuous ones, the launcher marks these when the whole script has succeeded.
        """
        settings, path = self._context.settings, self._resumed_from
        if path is not None and not checkpoint_folders.is_continuous(path):
            emergency_checkpoint.mark_used(path)
        if self._context.manager is not None and not settings.checkpoint_every:
            model = emergency_checkpoint.model_fingerprint(self._context.protected)
            checkpoint_folders.retire(Path(settings.dump_dir), model)

    def _next_number(self, after: int) -> int:
        """With attempts the script runs the code after each step, and leaves out none.

        Without, a step that was abandoned is yielded again.
        """
        if self._cycle.by_attempts:
            return min(after, self._context.step)
        if self._context.is_protected:
            self._context.protected.enter_turn()
        return self._context.step

    def _join_turn(self) -> None:
        """A replacement begins with the turn of its predecessor, or with the one after."""
        context = self._context
        context.position.join(context.step, context.values.can_restore)
        if context.position.next_turn(context.step) == context.step:
            context.protected.received_turn |= context.turn_parts.of_predecessor(context.step)
            context.protected.enter_turn()

    def section(self, name: str) -> Section:
        """A part of the script outside of steps that all ranks pass together.

        Wrap evaluation, checkpoints and other collectives between steps, before the first one or
        after the last one, so that they are repeated if a rank is lost in them. Without it, such a
        loss restarts all ranks. All ranks must pass the same sections in the same order. A section
        must not change weights; other protected state is restored before it is repeated.

        Args:
            name: For messages.

        Example:
            ```python
            for step in job.steps(10_000):
                loss = step.run(train_step, step)
                if step % 1000 == 999:
                    accuracy = job.section("validation").run(evaluate, model)
                    for attempt in job.section("checkpoint"):
                        with attempt:
                            dcp.save(state, checkpoint_id=f"{folder}/{step}")
            ```
        """
        return Section(name, self._cycle, self._recovery)

    def _start_at(self, start: int) -> bool:
        """All ranks start at the script's own start, or at an emergency checkpoint beyond it.

        Returns:
            Whether all steps are done, and only the code after them is left.
        """
        context = self._context
        directory = context.settings.dump_dir
        found = emergency_checkpoint.find(context.protected, directory, start)
        final = final_state.find(context, start)
        assert context.comparison is not None
        checkpoint, kept = (found[1].step if found else 0), (final.step if final else 0)
        names = emergency_checkpoint.model_fingerprint(context.protected), secrets.token_hex(4)
        mine = (start, checkpoint, kept, context.comparison.description(), names)
        gathered = sealed_objects.all_gather(mine)
        starts, checkpoints, finals, described, named = zip(*gathered, strict=True)
        if len(set(starts)) > 1:
            raise SettingsError([f"steps(start=…) must be the same on all ranks, got {starts}"])
        level = logging.WARNING if self.rank == 0 else logging.INFO
        if final is not None and len(set(finals)) == 1 and final.step >= max(checkpoints):
            start = final.step
            final_state.load(context, final)
            log.log(level, "all %d steps are done: only the code after them runs again", start)
        elif found is not None and len(set(checkpoints)) == 1:
            self._resumed_from, start = found[0], found[1].step
            emergency_checkpoint.load(context.protected, self._resumed_from)
            context.variables.warn_about_first_values(start)
            log.log(level, "resuming at step %d from %s", start, self._resumed_from)
        elif any(checkpoints):
            log.warning(
                "emergency checkpoint is not used, because not all ranks see the same one: "
                "steps=%s (0: none)",
                checkpoints,
            )
        is_over = final is not None and start == final.step
        if not is_over:
            context.values.forget_predecessor()
            context.values_at_update.forget_predecessor()
            context.variables.forget_predecessor()
        context.protected.enter_turn()
        context.step = context.held_step = start
        context.comparison.start(start, described, *named[0])
        if context.manager is not None:
            context.manager.step = CommittedStep(start)
        return is_over

    def _all_finished(self, total: int) -> bool:
        """No rank leaves before all have committed the last step: a late loss needs a source."""
        context = self._context
        if context.manager is None or context.position.done_until > (total, 0):
            return True
        if self._cycle.by_attempts:
            self._cycle.begin_turn(total)
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
