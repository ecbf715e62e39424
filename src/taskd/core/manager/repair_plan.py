"""The plan of a repair: where everybody resumes, who gives state to whom, who is in the world.

The argument. A rank commits step s when its optimizer has finished, and it gets that far only
after the step's collectives completed on it without error; a completed collective gave the right
result. So any whole state of step s is *the* state of step s, whoever holds it, and the job may go
on from any step that exists completely: from each shard, one holder at that same step. The
highest such step loses nothing that could be kept. Nobody votes and no barrier is needed;
`tests/sim/explore_repair.py` walks every interleaving of small worlds to see that it holds.

A holder offers the state it stands at; the step before it, if it can undo one; and the snapshots
it keeps. The manager (`core/manager/strategy_actions.py`) calls this with what the ranks said
when they parked; `core/worker/machine.py` carries the plan out in each worker.
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
"""A source on another node costs as much as two more takers at a source on one's own."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A living rank that stands still, and the state that it can give."""

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
        """What it can give, and how good that is: 0 as it stands, 1 by going back, a copy."""
        given = {(copy.shard, copy.step): COPY for copy in self.copies}
        if self.whole and self.undo and self.step > 0:
            given[self.shard, Step(self.step - 1)] = 1
        if self.whole:
            given[self.shard, self.step] = 0
        return given


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank that is started anew, and where."""

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
    """Who takes its state from whom. A rank that is not named keeps, or finds, its own."""
    replaced: tuple[Member, ...]
    leaving: tuple[Rank, ...]
    because: str
    helpers: Mapping[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Who else holds what a taker needs, and can give it a part of it."""


@dataclass(frozen=True, slots=True)
class Impossible:
    because: str


def plan(holders: Iterable[Holder], seats: Iterable[Placement] = ()) -> Plan | Impossible:
    """Holders stay, seats are filled; everybody resumes at the highest complete step."""
    staying = sorted(holders, key=lambda holder: holder.rank)
    arriving = sorted(seats, key=lambda seat: seat.rank)
    return _plan(staying, arriving, ())


def shrink(holders: Iterable[Holder], lost: Iterable[Placement]) -> Plan | Impossible:
    """Go on without every replica that has lost a rank."""
    present = sorted(holders, key=lambda holder: holder.rank)
    broken = {_replica(seat) for seat in lost}
    staying = [holder for holder in present if _replica(holder) not in broken]
    leaving = tuple(holder.rank for holder in present if _replica(holder) in broken)
    if not staying:
        return Impossible("every replica has lost a rank")
    return _plan(staying, [], leaving)


def complete_step(holders: Iterable[Holder], shards: Iterable[str]) -> Step | None:
    """The highest step that exists completely, or None when there is none."""
    wanted = set(shards)
    at: dict[Step, set[str]] = {}
    for holder in holders:
        for shard, step in holder.offers():
            at.setdefault(step, set()).add(shard)
    return max((step for step, held in at.items() if wanted <= held), default=None)


def _plan(
    staying: list[Holder], arriving: list[Placement], leaving: tuple[Rank, ...]
) -> Plan | Impossible:
    shards = {held.shard for held in staying} | {seat.shard for seat in arriving}
    resume = complete_step(staying, shards)
    if resume is None:
        return Impossible(_what_is_missing(staying, shards))
    sources = _sources(staying, arriving, resume)
    replaced = tuple(Member(seat.rank, seat.node, seat.incarnation) for seat in arriving)
    stay = tuple(Member(held.rank, held.node, held.incarnation) for held in staying)
    members = tuple(sorted((*stay, *replaced), key=lambda member: member.rank))
    because = f"{len(members)} ranks resume at step {resume}, {len(sources)} of them from a peer"
    helpers = _helpers(staying, arriving, resume, sources)
    return Plan(members, resume, sources, replaced, leaving, because, helpers)


def _helpers(
    staying: list[Holder], arriving: list[Placement], resume: Step, sources: Mapping[Rank, Rank]
) -> dict[Rank, tuple[Rank, ...]]:
    """Of those who stand there themselves: a copy of somebody else's state is asked for whole."""
    needy: list[Holder | Placement] = [*staying, *arriving]
    shards = {one.rank: one.shard for one in needy}
    able: dict[str, list[Rank]] = {}
    for held in staying:
        if held.offers().get((held.shard, resume), COPY) < COPY:
            able.setdefault(held.shard, []).append(held.rank)
    found = {}
    for taker, source in sources.items():
        others = able.get(shards[taker], [])
        if source in others:
            # Beginning behind the source, so that not all takers have the same helpers.
            at = others.index(source) + 1
            found[taker] = tuple((others[at:] + others[: at - 1])[:MOST_HELPERS])
    return {taker: others for taker, others in found.items() if others}


def _sources(staying: list[Holder], arriving: list[Placement], resume: Step) -> dict[Rank, Rank]:
    givers: dict[str, list[tuple[int, Holder]]] = {}
    for holder in staying:
        for (shard, step), cost in holder.offers().items():
            if step == resume:
                givers.setdefault(shard, []).append((cost, holder))
    needy: list[Holder | Placement] = [
        holder for holder in staying if (holder.shard, resume) not in holder.offers()
    ]
    takers: Counter[Rank] = Counter()
    chosen: dict[Rank, Rank] = {}
    for taker in (*needy, *arriving):
        _, source = min(
            givers[taker.shard],
            key=lambda giver: (
                giver[0],
                takers[giver[1].rank] + (FAR_AWAY if giver[1].node != taker.node else 0),
                giver[1].rank,
            ),
        )
        takers[source.rank] += 1
        chosen[taker.rank] = source.rank
    return chosen


def _what_is_missing(staying: list[Holder], shards: set[str]) -> str:
    held = {shard for holder in staying for shard, _ in holder.offers()}
    if not held:
        return "no survivor holds any state"
    if shards - held:
        return f"nobody holds shard {', '.join(sorted(shards - held))}"
    return "the shards exist, but at no common step"


def _replica(one: Holder | Placement) -> int:
    return one.replica if one.replica >= 0 else -1 - one.rank
