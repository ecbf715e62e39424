"""The ranks compare what they hold, so that no rank ever gets the state of a peer that differs.

Before the first step, and at the gate of later ones (`step_cycle.py`), each rank sends the
fingerprints of its state to all others in one small tensor: of the whole state in steps 0, 1, 2, 4,
8 and so on, of the parts that may change at any time in every step. `core/worker/state_classes.py`
decides what follows. The result is the same on all ranks that have received it; a repair
(`apply_plan.py`) brings it to the others and to replacements.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from taskd import config
from taskd.core.manager.repair.copy_placement import survives_node_loss
from taskd.core.worker import copy_interval, state_classes, state_evidence
from taskd.core.worker.state_classes import Agreement, StatePrint
from taskd.core.worker.state_evidence import Evidence
from taskd.errors import Transient
from taskd.model.ids import Rank
from taskd.torch import compat
from taskd.torch.context import JobContext
from taskd.torch.groups.store import Rendezvous
from taskd.torch.loop.loop_variables import LoopVariables
from taskd.torch.replicas.replica_check import ReplicaCheck
from taskd.torch.state import fingerprints, pieces, sharded
from taskd.torch.state.protected import OptimizerOptions
from taskd.torch.state.sealed import seal, unseal

log = logging.getLogger(__name__)

VERSION_KEY, AGREEMENT_KEY, TURN_KEY = "agreed", "agreement", "turn"

Description = tuple[str, dict[str, bool]]
"""The name of a rank's shard, and its parts: whether they are compared in every step."""


class NotReplicas(Transient):
    """Ranks that counted as replicas hold different state."""


def may_differ(part: object) -> bool:
    """Whether the part may come to differ at any time.

    What a scheduler of the learning rate does follows from the number of the step, unless it is
    given a measurement. Parts of an adapter can say the same by `follows_from_step`.
    """
    if isinstance(part, OptimizerOptions) or getattr(part, "follows_from_step", False):
        return False
    if isinstance(part, LoopVariables):
        return part.may_differ
    return not isinstance(part, LRScheduler) or isinstance(part, ReduceLROnPlateau)


class Comparison:
    """One rank's part in the comparisons of a job."""

    def __init__(self, context: JobContext, snapshot_every: int | None) -> None:
        """`snapshot_every`: as given by the script."""
        self._context, self._snapshot_every = context, snapshot_every
        self._protected = context.protected
        self._is_late = False
        self.has_late_exchange = False
        """A step has exchanged data after its update had begun, on this rank or any other."""
        self._has_left_gradients = False
        self._at_gate: tuple[int | str, ...] | None = None
        """What only this rank has, when it was copied."""
        self._is_turn_known = False
        """In the present repair, a peer has completed the code after the step."""
        self._name, self._replica = sharded.describe(self._protected)
        self._per_node = int(config.environ.get("LOCAL_WORLD_SIZE", "1"))
        context.shard, context.replica = self._name, self._replica
        self.replicas = ReplicaCheck(context)
        self._parts_at_gate: dict[str, int] = {}
        """The fingerprints of the parts that were last compared."""

    @property
    def agreement(self) -> Agreement | None:
        return self._protected.agreement

    # Before the first step

    def description(self) -> Description:
        """What the ranks tell each other before their first comparison."""
        return self._name, {name: may_differ(part) for name, part in self._protected.parts.items()}

    def start(self, step: int, described: Sequence[Description], model: str, run: str) -> None:
        """All ranks call it together, with the descriptions of all, before their first step.

        `model`, `run`: as in `Agreement`.
        """
        shards = {Rank(rank): name for rank, (name, _) in enumerate(described)}
        parts = sorted({part for _, names in described for part in names})
        watched = {part for _, names in described for part, watch in names.items() if watch}
        self._protected.record_parts()
        before = Agreement(
            shards, tuple(parts), frozenset(watched), start=step, model=model, run=run
        )
        prints = self._gather(self._print(before, whole=True))
        agreement = state_classes.agree(before, step, step, prints)
        self.adopt(agreement)
        self._warn_about_crowded_replicas(agreement)

    def _warn_about_crowded_replicas(self, agreement: Agreement) -> None:
        rank, size = self._context.rank, self._context.world_size
        if size <= self._per_node or rank % self._per_node:
            return
        alike = agreement.members()[self._context.shard]
        if len(alike) > 1 and not survives_node_loss(alike, size, self._per_node):
            log.warning(
                "all replicas of a shard are on this node: snapshots are copied to another node"
            )

    # At the gate

    def is_due(self, step: int, has_left_gradients: bool) -> bool:
        """Whether the ranks compare anything at the gate of this step."""
        agreement = self.agreement
        return agreement is not None and state_classes.is_due(agreement, step, has_left_gradients)

    def compare(self, step: int, has_left_gradients: bool) -> bool | None:
        """Whether something has changed in what the ranks know. None: the groups broke."""
        before = self.agreement
        assert before is not None
        whole = state_classes.is_whole_due(before, step)
        prints = self._gather(self._print(before, whole, has_left_gradients))
        if self._context.groups.is_broken():
            return None
        after = state_classes.agree(before, step, step + 1, prints)
        if after == before:
            return False
        self.adopt(after)
        self._log(before, after)
        return True

    def sample(self, step: int, has_left_gradients: bool) -> None:
        """The ranks have compared all that they compare in this step."""
        if self.agreement is not None:
            self.replicas.at_gate(self.agreement, step, has_left_gradients)

    def copy_own(self, step: int, has_left_gradients: bool) -> None:
        """Copy what only this rank will have in the state of that step, before any rank has it."""
        agreement = self.agreement
        self._has_left_gradients = has_left_gradients
        if agreement is not None and agreement.has_own and not agreement.is_late:
            parts = pieces.own_part_states(self._protected, step)
            self._copy_own(step, parts)
            self._at_gate = self._own_versions(step, parts)

    def _copy_own(self, step: int, parts: dict[str, Any]) -> None:
        context = self._context
        context.copies.copy_own(step, context.incident, self._has_left_gradients, parts)

    def finish(self, step: int) -> None:
        """The step ends: what has changed since the gate is copied again, and the ranks learn it.

        From then on they make this copy here and not at the gate, and copy their whole state after
        each step, so that all ranks can go back by one step if one is lost before its copy is made.
        """
        agreement, protected = self.agreement, self._protected
        protected.record_parts()
        recorded, names = protected.recorded_parts(), protected.own_parts(step)
        own = {name: state for name, state in recorded.items() if name in names}
        if self._at_gate is not None and self._own_versions(step, own) != self._at_gate:
            self._is_late = True
            self._copy_own(step, own)
        elif agreement is not None and agreement.has_own and agreement.is_late:
            self._copy_own(step, own)
        self._at_gate = None
        if agreement is not None and agreement.has_replicas():
            self.replicas.at_end(agreement, step, self._parts_at_gate)
        self._parts_at_gate = {}

    def begin_turn(self, turn: int) -> None:
        """The code between two steps is done: what it has changed belongs to the state, too."""
        self._protected.record_turn(turn)
        self._context.turn_parts.save(turn, self._protected.turn_parts(turn) or {})

    # After a fault

    def exchange(self, rendezvous: Rendezvous, members: Sequence[int], resume: int) -> None:
        """Every member gets the newest result: some may have been lost before they had it.

        And those that receive a state get what the code after its step has changed.
        """
        store, mine = rendezvous.store, self.agreement or self._context.kept_agreement.predecessor
        version = -1 if mine is None else mine.version
        place = _place(AGREEMENT_KEY, rendezvous)
        changed = None
        if self._context.held_step == resume and self._protected.turn_parts(resume) is not None:
            changed = self._changes(pieces.turn_states(self._protected, resume, own=False))
        row = f"{version} {int(changed is not None)}"
        store.set(f"{VERSION_KEY}/{self._context.rank}", row)
        rows = {
            rank: tuple(map(int, value.split()))
            for rank, value in zip(
                members, store.multi_get([f"{VERSION_KEY}/{rank}" for rank in members]), strict=True
            )
        }
        ahead = [rank for rank, (_, has_begun) in rows.items() if has_begun]
        if ahead and ahead[0] == self._context.rank:
            store.set(TURN_KEY, seal(changed, _place(TURN_KEY, rendezvous)))  # type: ignore[arg-type]
        self._is_turn_known = bool(ahead)
        versions = {rank: known for rank, (known, _) in rows.items()}
        newest = max(versions.values())
        if newest < 0:
            return
        first = min(rank for rank, known in versions.items() if known == newest)
        if first == self._context.rank and len(set(versions.values())) > 1:
            store.set(AGREEMENT_KEY, seal(mine, place))  # type: ignore[arg-type]
        if version < newest:
            self.adopt(unseal(store.get(AGREEMENT_KEY), place))
        elif self.agreement is None and mine is not None:
            self.adopt(mine)  # all ranks were replaced

    def receive_turn(self, rendezvous: Rendezvous) -> None:
        """After a state was received: see `exchange`."""
        if not self._is_turn_known:
            return
        changed = unseal(rendezvous.store.get(TURN_KEY), _place(TURN_KEY, rendezvous))
        mine = self._changes({name: None for name in changed})
        self._protected.received_turn |= {
            # Where the part was another one before, the change belongs to another shard.
            name: state
            for name, (before, state) in changed.items()
            if mine[name][0] == before
        }

    def _changes(self, states: dict[str, Any]) -> dict[str, tuple[int, Any]]:
        """Each of them with the fingerprint of what it was when the step was committed."""
        recorded = self._protected.recorded_parts()
        return {
            name: (fingerprints.of_value(recorded.get(name)), state)
            for name, state in states.items()
        }

    def review(
        self, mine: Evidence, rendezvous: Rendezvous, members: Sequence[int], resume: int
    ) -> None:
        """Before any rank receives the state of a peer: they must have been replicas to the end.

        Raises:
            NotReplicas: Some were not. The next plan is made for what each of them holds.
        """
        before = self.agreement
        after = self.replicas.review(mine, rendezvous, members, resume)
        if before is None or after is None:
            return
        self.adopt(after)
        if after.own_parts != before.own_parts or after.buffers_since != before.buffers_since:
            self._context.copies.forget_own(resume)  # they lack what now counts as such
        raise NotReplicas(state_evidence.explain(before, after))

    def adopt(self, agreement: Agreement) -> None:
        """Act on it from now on."""
        context = self._context
        self._protected.agreement = agreement
        context.kept_agreement.save(agreement)
        self._is_late = self._is_late and not agreement.is_late
        self.has_late_exchange = self.has_late_exchange or agreement.has_late_exchange
        context.shard = agreement.shards[Rank(context.rank)]
        if context.shard == self._name:
            context.replica = self._replica
        else:
            context.replica = 0  # which ranks form a replica is not known
        context.votes = not agreement.is_uniform or agreement.has_own
        context.copies.every = self._copies_every(agreement)
        if context.copies.snapshots is not None:
            context.copies.snapshots.shard = context.shard
        if context.manager is not None:
            context.manager.shard_known(context.shard, context.replica, agreement.own_since)

    def _copies_every(self, agreement: Agreement) -> int:
        if self._snapshot_every is not None:
            return self._snapshot_every
        # Between two updates of a step, all ranks are halfway between two steps at once.
        several = len(self._protected.optimizers) > 1 or agreement.has_late_exchange
        size = self._context.world_size
        survives = agreement.survives_node_loss(size, self._per_node)
        if not (several or agreement.is_late or not survives):
            return 0
        # What only one rank has is copied in every step, and only the last two copies are kept.
        return 1 if agreement.is_late or agreement.has_own else agreement.copies_every

    # Fingerprints

    def _print(
        self, agreement: Agreement, whole: bool, has_left_gradients: bool = False
    ) -> StatePrint:
        protected = self._protected
        compared = set(agreement.parts) if whole else set(agreement.watched)
        compared -= agreement.own_parts.keys()
        parts = tuple(
            fingerprints.of_value(protected.parts[name].state_dict())
            if name in compared and name in protected.parts
            else 0
            for name in agreement.parts
        )
        self._parts_at_gate = {
            name: one for name, one in zip(agreement.parts, parts, strict=True) if one
        }
        if not whole:
            return StatePrint(
                has_left_gradients=has_left_gradients,
                is_late=self._is_late,
                parts=parts,
                has_late_exchange=self.has_late_exchange,
            )
        guarded = self._context.guard is not None and self.agreement is not None
        return StatePrint(
            # Replicas that differ by mistake are the guard's to find.
            0 if guarded else fingerprints.of_state(protected),
            0 if guarded or self.agreement is None else fingerprints.of_gradients(protected),
            fingerprints.of_buffers(protected),
            has_left_gradients,
            self._is_late,
            parts,
            self._context.copies.propose_interval() if self._snapshot_every is None else 0,
            self.has_late_exchange,
        )

    def _own_versions(self, step: int, parts: dict[str, Any]) -> tuple[int | str, ...]:
        """What changes when anything changes that only this rank has: `parts`, and buffers."""
        protected = self._protected
        versions = [
            state if isinstance(state, str) else fingerprints.of_value(state)
            for _, state in sorted(parts.items())
        ]
        if protected.has_own_buffers(step):
            versions += [compat.version_of(buffer) for buffer in protected.buffers()]
        return tuple(versions)

    def _gather(self, mine: StatePrint) -> dict[Rank, StatePrint]:
        world = self._context.groups.world.shape
        device = "cpu" if "cpu" in world.backends else next(iter(world.backends))
        row = [mine.state, mine.gradients, mine.buffers, mine.has_left_gradients, mine.is_late]
        row += [mine.has_late_exchange, mine.copies_every]
        packed = torch.tensor([*map(int, row), *mine.parts], dtype=torch.int64, device=device)
        received = packed.new_empty(world.size * packed.numel())
        compat.all_gather_into(self._context.groups.world, received, packed).wait()
        self._context.groups.wait_for_devices()
        rows = received.view(world.size, -1).tolist()
        return {
            Rank(rank): StatePrint(
                state=one[0],
                gradients=one[1],
                buffers=one[2],
                has_left_gradients=one[3] == 1,
                is_late=one[4] == 1,
                has_late_exchange=one[5] == 1,
                copies_every=one[6],
                parts=tuple(one[7:]),
            )
            for rank, one in zip(world.ranks, rows, strict=True)
        }

    def _log(self, before: Agreement, after: Agreement) -> None:
        step, own = self._context.step, state_classes.describe(after)
        if after.shards != before.shards:
            log.warning(
                "step %d: the models or optimizers of the ranks have become different: each rank "
                "counts as holding its own shard from now on, shards=%d",
                step,
                len(after.members()),
            )
        every = self._copies_every(after)
        if every != self._copies_every(before) and every > 1 and self._context.rank == 0:
            log.warning(
                "step %d: the state is copied after every %d steps, so that copies make steps at "
                "most %.0f %% longer: %s. If a rank is lost, up to %d steps are done again",
                step,
                every,
                100 * copy_interval.SHARE,
                self._context.copies.describe_costs(),
                every,
            )
        if after.has_late_exchange and not before.has_late_exchange and self._context.rank == 0:
            log.info(
                "step %d: steps exchange data after their first update: the state is copied after "
                "each step, so that none is lost if a rank fails in between",
                step,
            )
        if own and own != state_classes.describe(before):
            log.info("step %d: every rank copies its own state in each step: %s", step, own)
        if after.is_late and not before.is_late:
            log.warning(
                "step %d: %s changes after the optimizer's update: the whole state is copied "
                "after each step from now on. Change it before the update to avoid that",
                step,
                own,
            )


def _place(key: str, rendezvous: Rendezvous) -> str:
    return f"{key} at {rendezvous.prefix}"
