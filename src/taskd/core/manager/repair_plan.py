"""The plan of a repair: the step at which all resume, the members, and who copies whose state.

Why this is correct: a rank commits step s when its optimizer has finished, and it gets there only
if the collectives of the step completed on it without an error; a completed collective gave the
correct result. So every whole state of step s is *the* state of step s, no matter which rank holds
it, and the job can resume at any step that exists completely: one holder of each shard at the same
step. The highest such step loses the least. No vote and no barrier is needed;
`tests/sim/explore_repair.py` checks this over all interleavings of small worlds.

A holder offers its current state, the step before it if it can undo one, and its snapshots. The
manager (`strategy_actions.py`) calls this with the ranks' Parked messages; `core/worker/machine.py`
carries the plan out in each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from taskd.model.ids import Incarnation, NodeRank, Rank, Step
from taskd.model.messages import Copy, Member

COPY = 2
MOST_HELPERS = 3
FAR_AWAY = 2
"""A source on another node costs as much as two more receivers at a source on the same node."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A parked rank, and the state that it can give to others."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    step: Step
    whole: bool = True
    undo: bool = False
    shard: str = ""
    replica: int = -1
    copies: tuple[Copy, ...] = ()

    def offers(self) -> dict[tuple[str, Step], int]:
        """What it can give, and the cost: 0 its current state, 1 after an undo, COPY a snapshot."""
        given = {(copy.shard, copy.step): COPY for copy in self.copies}
        if self.whole and self.undo and self.step > 0:
            given[self.shard, Step(self.step - 1)] = 1
        if self.whole:
            given[self.shard, self.step] = 0
        return given


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank that gets a new process, and the node of that process."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    shard: str = ""
    replica: int = -1


@dataclass(frozen=True, slots=True)
class Plan:
    members: tuple[Member, ...]
    resume: Step
    sources: Mapping[Rank, Rank]
    """The source of each rank that copies its state. A rank that is not named has its own."""
    replaced: tuple[Member, ...]
    leaving: tuple[Rank, ...]
    because: str
    helpers: Mapping[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Further ranks that hold what a receiver needs and can send it a part."""


@dataclass(frozen=True, slots=True)
class Impossible:
    because: str


def plan(holders: Iterable[Holder], placements: Iterable[Placement] = ()) -> Plan | Impossible:
    """Holders stay, placements are started; all resume at the highest complete step."""
    staying = sorted(holders, key=lambda holder: holder.rank)
    arriving = sorted(placements, key=lambda placement: placement.rank)
    return _plan(staying, arriving, ())


def shrink(holders: Iterable[Holder], lost: Iterable[Placement]) -> Plan | Impossible:
    """Continue without every replica that has lost a rank."""
    present = sorted(holders, key=lambda holder: holder.rank)
    broken = {_replica(placement) for placement in lost}
    staying = [holder for holder in present if _replica(holder) not in broken]
    leaving = tuple(holder.rank for holder in present if _replica(holder) in broken)
    if not staying:
        return Impossible("every replica has lost a rank")
    return _plan(staying, [], leaving)


def complete_step(holders: Iterable[Holder], shards: Iterable[str]) -> Step | None:
    """The highest step of which every shard is held by some rank. None: there is no such step."""
    wanted = set(shards)
    at: dict[Step, set[str]] = {}
    for holder in holders:
        for shard, step in holder.offers():
            at.setdefault(step, set()).add(shard)
    return max((step for step, held in at.items() if wanted <= held), default=None)


def _plan(
    staying: list[Holder], arriving: list[Placement], leaving: tuple[Rank, ...]
) -> Plan | Impossible:
    shards = {held.shard for held in staying} | {placement.shard for placement in arriving}
    resume = complete_step(staying, shards)
    if resume is None:
        return Impossible(_explain_missing(staying, shards))
    sources = _sources(staying, arriving, resume)
    replaced = tuple(
        Member(placement.rank, placement.node, placement.incarnation) for placement in arriving
    )
    stay = tuple(Member(held.rank, held.node, held.incarnation) for held in staying)
    members = tuple(sorted((*stay, *replaced), key=lambda member: member.rank))
    because = f"{len(members)} ranks resume at step {resume}, {len(sources)} of them from a peer"
    helpers = _helpers(staying, arriving, resume, sources)
    return Plan(members, resume, sources, replaced, leaving, because, helpers)


def _helpers(
    staying: list[Holder], arriving: list[Placement], resume: Step, sources: Mapping[Rank, Rank]
) -> dict[Rank, tuple[Rank, ...]]:
    """Only ranks whose own state is at this step help: a snapshot is always sent as a whole."""
    receiving: list[Holder | Placement] = [*staying, *arriving]
    shards = {one.rank: one.shard for one in receiving}
    able: dict[str, list[Rank]] = {}
    for held in staying:
        if held.offers().get((held.shard, resume), COPY) < COPY:
            able.setdefault(held.shard, []).append(held.rank)
    found = {}
    for receiver, source in sources.items():
        others = able.get(shards[receiver], [])
        if source in others:
            # Start after the source, so that not all receivers have the same helpers.
            at = others.index(source) + 1
            found[receiver] = tuple((others[at:] + others[: at - 1])[:MOST_HELPERS])
    return {receiver: others for receiver, others in found.items() if others}


def _sources(staying: list[Holder], arriving: list[Placement], resume: Step) -> dict[Rank, Rank]:
    sources_of: dict[str, list[tuple[int, Holder]]] = {}
    for holder in staying:
        for (shard, step), cost in holder.offers().items():
            if step == resume:
                sources_of.setdefault(shard, []).append((cost, holder))
    receiving: list[Holder | Placement] = [
        holder for holder in staying if (holder.shard, resume) not in holder.offers()
    ]
    receivers: Counter[Rank] = Counter()
    chosen: dict[Rank, Rank] = {}
    for receiver in (*receiving, *arriving):
        _, source = min(
            sources_of[receiver.shard],
            key=lambda source: (
                source[0],
                receivers[source[1].rank] + (FAR_AWAY if source[1].node != receiver.node else 0),
                source[1].rank,
            ),
        )
        receivers[source.rank] += 1
        chosen[receiver.rank] = source.rank
    return chosen


def _explain_missing(staying: list[Holder], shards: set[str]) -> str:
    held = {shard for holder in staying for shard, _ in holder.offers()}
    if not held:
        return "no surviving rank holds any state"
    if shards - held:
        return f"no rank holds shard {', '.join(sorted(shards - held))}"
    return "all shards exist, but not at the same step"


def _replica(one: Holder | Placement) -> int:
    return one.replica if one.replica >= 0 else -1 - one.rank
