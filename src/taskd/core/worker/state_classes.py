"""Which ranks hold the same state: decided from what the ranks are seen to hold.

Each rank sends fingerprints of its state to all others (`torch/replicas/comparison.py`). Ranks with
equal state form a class and can give it to each other, as under DDP. Where ranks of one class
differ in an object of the script, in their buffers or in gradients that they have collected, that
belongs to each rank alone. A class may be divided later, never joined: what has differed once is
never again taken for the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from taskd.core.manager.repair.copy_placement import survives_node_loss
from taskd.core.worker import copy_interval
from taskd.model.ids import Rank

DIVIDED = "rank-"


@dataclass(frozen=True, slots=True)
class StatePrint:
    """The fingerprints of one rank. 0: not taken this time, or nothing there."""

    state: int = 0
    """Weights, optimizers, scalers."""
    gradients: int = 0
    """Gradients that the next update uses: ranks with different ones will differ."""
    buffers: int = 0
    has_left_gradients: bool = False
    """The step makes no update and leaves its gradients to the next one."""
    is_late: bool = False
    """What only this rank has changed after the update had begun: see `Agreement.is_late`."""
    parts: tuple[int, ...] = ()
    copies_every: int = copy_interval.NO_PROPOSAL
    """How often this rank could copy its state without slowing down training."""
    has_late_exchange: bool = False
    """A step has exchanged data after its update had begun: see `Agreement.has_late_exchange`."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know about each other's state since one comparison."""

    shards: Mapping[Rank, str]
    """The name of the state of each rank. Ranks with the same name hold the same."""
    parts: tuple[str, ...] = ()
    """The names of the objects that any rank gave to `protect`, in order."""
    watched: frozenset[str] = frozenset()
    """Those that are compared in every step."""
    version: int = 0
    """It grows with each comparison that has changed something."""
    start: int = 0
    """The step at which the ranks compared their state for the first time."""
    own_parts: Mapping[str, int] = field(default_factory=dict)
    """Objects whose state differs within a class, and since which step."""
    buffers_since: int = -1
    """The same for the buffers of the models. -1: they are equal."""
    gradients_since: int = -1
    """The first step that has left gradients to the next one. -1: none has."""
    is_late: bool = False
    """What only one rank has may still change after the update, when its copy is already made. So
    the ranks must be able to go back to the step before."""
    copies_every: int = 1
    """After how many steps a state that exists once is copied, unless the script says it."""
    has_late_exchange: bool = False
    """Steps have several updates, or exchange results after the update. A fault in between leaves
    all ranks halfway between two steps, so they must be able to go back to the one before."""
    model: str = ""
    """A fingerprint of the model of rank 0, which names the job's continuous checkpoints."""
    run: str = ""
    """A random name of this start of all ranks."""

    @property
    def own_since(self) -> int:
        """The step from which on ranks have state of their own. -1: none."""
        known = [*self.own_parts.values(), self.buffers_since, self.gradients_since]
        return min((step for step in known if step >= 0), default=-1)

    @property
    def has_own(self) -> bool:
        known = (self.buffers_since, self.gradients_since, *self.own_parts.values())
        return max(known) >= 0

    @property
    def is_divided(self) -> bool:
        """The names of the shards are not only those of distributed tensors."""
        return any(DIVIDED in name for name in self.shards.values())

    @property
    def is_uniform(self) -> bool:
        """Every rank holds the same, apart from what is its own."""
        return set(self.shards.values()) <= {""}

    def members(self) -> dict[str, list[Rank]]:
        """The ranks of each class."""
        classes: dict[str, list[Rank]] = {}
        for rank in sorted(self.shards):
            classes.setdefault(self.shards[rank], []).append(rank)
        return classes

    def has_replicas(self) -> bool:
        """Whether any state is held by more than one rank."""
        return len(set(self.shards.values())) < len(self.shards)

    def survives_node_loss(self, size: int, per_node: int) -> bool:
        """Whether each state is left in a job of this size when any one node is lost."""
        return self.is_uniform or all(
            survives_node_loss(ranks, size, per_node) for ranks in self.members().values()
        )


def is_whole_due(agreement: Agreement, step: int) -> bool:
    """Whether the ranks compare their whole state in this step: often at first, then rarely."""
    done = step - agreement.start
    return done & (done - 1) == 0


def is_due(agreement: Agreement, step: int, has_left_gradients: bool) -> bool:
    """Whether the ranks compare anything in this step. The same on all of them."""
    return (
        agreement.has_own
        or has_left_gradients
        or (agreement.has_replicas() and not agreement.watched <= agreement.own_parts.keys())
        or is_whole_due(agreement, step)
    )


def agree(before: Agreement, step: int, since: int, prints: Mapping[Rank, StatePrint]) -> Agreement:
    """The agreement after a comparison in this step; differences count from step `since` on."""
    if _are_calm(prints):
        return before
    shards = dict(before.shards)
    for name, ranks in before.members().items():
        shards |= _divided(name, [rank for rank in ranks if rank in prints], step, prints)
    after = replace(before, shards=shards)
    classes = [[rank for rank in ranks if rank in prints] for ranks in after.members().values()]

    def differ(values: Mapping[Rank, int]) -> bool:
        return any(len({values[rank] for rank in ranks}) > 1 for ranks in classes)

    own_parts = dict(before.own_parts)
    for index, part in enumerate(before.parts):
        if part not in own_parts and differ({r: one.parts[index] for r, one in prints.items()}):
            own_parts[part] = since
    buffers, gradients = before.buffers_since, before.gradients_since
    if buffers < 0 and differ({r: one.buffers for r, one in prints.items()}):
        buffers = since
    if gradients < 0 and any(one.has_left_gradients for one in prints.values()):
        gradients = since
    after = replace(
        after,
        own_parts=own_parts,
        buffers_since=buffers,
        gradients_since=gradients,
        is_late=before.is_late or any(one.is_late for one in prints.values()),
        copies_every=copy_interval.agree(
            before.copies_every, [one.copies_every for one in prints.values()]
        ),
        has_late_exchange=before.has_late_exchange
        or any(one.has_late_exchange for one in prints.values()),
    )
    return after if after == before else replace(after, version=before.version + 1)


def _are_calm(prints: Mapping[Rank, StatePrint]) -> bool:
    """Whether all ranks have sent the same, and nothing new: as in nearly all steps."""
    first = next(iter(prints.values()), StatePrint())
    is_news = (
        first.has_left_gradients
        or first.is_late
        or first.has_late_exchange
        or first.copies_every != copy_interval.NO_PROPOSAL
    )
    return not is_news and all(one == first for one in prints.values())


def _divided(
    name: str, ranks: list[Rank], step: int, prints: Mapping[Rank, StatePrint]
) -> dict[Rank, str]:
    """The new names of the ranks of a class; the same one if they hold the same."""
    kinds: dict[tuple[int, int], list[Rank]] = {}
    for rank in ranks:
        kinds.setdefault((prints[rank].state, prints[rank].gradients), []).append(rank)
    if len(kinds) < 2:
        return {}
    prefix = f"{name}/" if name else ""
    return {
        # With the step: a rank that was lost in it must not be taken for one of the old class.
        rank: f"{prefix}{DIVIDED}{same[0]}@{step}"
        for same in kinds.values()
        for rank in same
    }


def describe(agreement: Agreement) -> str:
    """What only one rank has, in words. Empty: nothing."""
    own = list(agreement.own_parts)
    if agreement.buffers_since >= 0:
        own.append("the buffers of the model")
    if agreement.gradients_since >= 0:
        own.append("gradients that a step leaves to the next one")
    return ", ".join(own)
