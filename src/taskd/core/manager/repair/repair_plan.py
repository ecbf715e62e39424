"""The plan of a repair: the step at which all resume, the members, and who copies whose state.

Why this is correct: a rank commits step s when its optimizer has finished, and it gets there only
if the collectives of the step completed on it without an error; a completed collective gave the
correct result. So every whole state of step s is *the* state of step s, no matter which rank holds
it, and the job can resume at any step that exists completely: one holder of each shard at the same
step. The highest such step loses the least. No vote and no barrier is needed;
`tests/sim/explore_repair.py` checks this over all interleavings of small worlds.

A holder offers its current state, the step before it if it can undo one, and its snapshots. What
only one rank has (its loader's position, gradients that it has collected) counts as one more shard,
which no other rank can give from its own state: only a copy of it helps its replacement. If the
highest complete step is one that the script of a holder has passed already, the holder gets a new
process, which starts from a snapshot on its node. The manager (`strategy_actions.py`) calls this
with the ranks' Parked messages; `core/worker/machine.py` carries the plan out in each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from taskd.core.worker.state_classes import DIVIDED
from taskd.model.ids import Incarnation, NodeRank, Rank, Step
from taskd.model.messages import FIRST_STEP, NO_TURN, Copy, Member, own_name

COPY = 2
MOST_HELPERS = 3
FAR_AWAY = 2
"""A source on another node costs as much as two more receivers at a source on the same node."""


class Needy(Protocol):
    """A rank, as far as it is known what it needs."""

    @property
    def rank(self) -> Rank: ...
    @property
    def shard(self) -> str: ...
    @property
    def own_since(self) -> int: ...


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
    earliest: Step = FIRST_STEP
    """Its script cannot go back before this step."""
    own_since: int = -1
    """From this step on it has state that no other rank has. -1: it has none."""
    turn: Step = NO_TURN
    """The step whose turn it is in its loop, and how many sections of that turn are complete."""
    sections: int = 0
    outside: str = ""
    """The line that has exchanged data in this turn outside of steps and sections."""

    def offers(self) -> dict[tuple[str, Step], int]:
        """What it can give, and the cost: 0 its current state, 1 after an undo, COPY a snapshot."""
        given = {(copy.shard, copy.step): COPY for copy in self.copies}
        for name in (self.shard, own_name(self.rank)):
            if self.whole and self.undo and self.step > 0:
                given[name, Step(self.step - 1)] = 1
            if self.whole:
                given[name, self.step] = 0
        return given


@dataclass(frozen=True, slots=True)
class Placement:
    """A rank that gets a new process, and the node of that process."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    shard: str = ""
    replica: int = -1
    own_since: int = -1


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
    own_sources: Mapping[Rank, Rank] = field(default_factory=dict)
    """Which rank has the copy of what only this rank had."""
    shards: Mapping[Rank, str] = field(default_factory=dict)
    """The shards of the replaced ranks."""
    own_since: int = -1
    """From this step on every rank has state that no other rank has. -1: none has any."""
    turn: Step = NO_TURN
    """The first turn of the loop that not all ranks have completed."""
    sections: int = 0
    """How many sections of that turn are complete: a rank that is beyond one has met all others
    at its end, so they have all they need of it."""


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
    lost = list(lost)
    if own_since((*present, *lost)) >= 0:
        return Impossible("every rank has state of its own, without which the job cannot continue")
    broken = {_replica(placement) for placement in lost}
    staying = [holder for holder in present if _replica(holder) not in broken]
    leaving = tuple(holder.rank for holder in present if _replica(holder) in broken)
    if not staying:
        return Impossible("every replica has lost a rank")
    return _plan(staying, [], leaving)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a number of ranks need to train, together."""

    shards: frozenset[str]
    own: frozenset[str] = frozenset()
    """What each of them has alone."""
    own_since: int = -1

    def at(self, step: int) -> frozenset[str]:
        return self.shards | self.own if 0 <= self.own_since <= step else self.shards


def needs(ranks: Iterable[Needy]) -> Needs:
    ranks = list(ranks)
    return Needs(
        frozenset(one.shard for one in ranks),
        frozenset(own_name(one.rank) for one in ranks),
        own_since(ranks),
    )


def own_since(ranks: Iterable[Needy]) -> int:
    """The ranks find out together that they have state of their own, but may say so one by one."""
    return min((one.own_since for one in ranks if one.own_since >= 0), default=-1)


def complete_step(holders: Iterable[Holder], needed: Needs) -> Step | None:
    """The highest step of which everything is held by some rank. None: there is no such step."""
    at: dict[Step, set[str]] = {}
    for holder in holders:
        for name, step in holder.offers():
            at.setdefault(step, set()).add(name)
    return max((step for step, held in at.items() if needed.at(step) <= held), default=None)


def _plan(
    staying: list[Holder], arriving: list[Placement], leaving: tuple[Rank, ...]
) -> Plan | Impossible:
    needed = needs([*staying, *arriving])
    resume = complete_step(staying, needed)
    if resume is None:
        return Impossible(_explain_missing(staying, needed))
    passed = [held for held in staying if held.earliest > resume]
    staying = [held for held in staying if held.earliest <= resume]
    arriving = sorted((*arriving, *map(_next_process, passed)), key=lambda one: one.rank)
    on_nodes = [replace(held, whole=False) for held in passed]
    sources = _sources(staying, arriving, on_nodes, resume, lambda one: one.shard)
    own_sources = {}
    if 0 <= needed.own_since <= resume:
        own_sources = _sources(staying, arriving, on_nodes, resume, lambda one: own_name(one.rank))
    replaced = tuple(
        Member(placement.rank, placement.node, placement.incarnation) for placement in arriving
    )
    stay = tuple(Member(held.rank, held.node, held.incarnation) for held in staying)
    members = tuple(sorted((*stay, *replaced), key=lambda member: member.rank))
    because = f"{len(members)} ranks resume at step {resume}, {len(sources)} of them from a peer"
    if passed:
        because += f"; ranks {_join(passed)} have passed it and get a new process"
    turn = _turn([*staying, *passed], resume)
    here = [held for held in staying if held.turn == turn]
    unrepeatable = next((held.outside for held in here if held.outside), "")
    if unrepeatable and arriving:
        return Impossible(
            f"a new process could not repeat the collective at {unrepeatable}, which is in no "
            "step: do it in an attempt, or in a section (job.section)"
        )
    return Plan(
        members,
        resume,
        sources,
        replaced,
        leaving,
        because,
        _helpers(staying, arriving, resume, sources),
        own_sources,
        {placement.rank: placement.shard for placement in arriving},
        needed.own_since,
        turn,
        max((held.sections for held in here), default=0),
    )


def _turn(holders: list[Holder], resume: Step) -> Step:
    turns = [held.turn for held in holders if held.turn != NO_TURN]
    if not turns:
        return NO_TURN
    return Step(resume - 1) if min(turns) < resume else resume


def _next_process(held: Holder) -> Placement:
    incarnation = Incarnation(held.incarnation + 1)
    return Placement(held.rank, held.node, incarnation, held.shard, held.replica, held.own_since)


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


def _sources(
    staying: list[Holder],
    arriving: list[Placement],
    on_nodes: list[Holder],
    resume: Step,
    name: Callable[[Holder | Placement], str],
) -> dict[Rank, Rank]:
    """`on_nodes`: what ranks that get a new process can still send from their node's memory."""
    sources_of: dict[str, list[tuple[int, Holder]]] = {}
    for holder, later in (*((one, 0) for one in staying), *((one, 1) for one in on_nodes)):
        for (held, step), cost in holder.offers().items():
            if step == resume:
                sources_of.setdefault(held, []).append((cost + later, holder))
    receiving: list[Holder | Placement] = [
        holder for holder in staying if (name(holder), resume) not in holder.offers()
    ]
    has_copy = {held.rank for held in on_nodes if (name(held), resume) in held.offers()}
    receiving += [placement for placement in arriving if placement.rank not in has_copy]
    receivers: Counter[Rank] = Counter()
    chosen: dict[Rank, Rank] = {}
    for receiver in receiving:
        _, source = min(
            sources_of[name(receiver)],
            key=lambda source: (
                source[0],
                receivers[source[1].rank] + (FAR_AWAY if source[1].node != receiver.node else 0),
                source[1].rank,
            ),
        )
        receivers[source.rank] += 1
        chosen[receiver.rank] = source.rank
    return chosen


def _explain_missing(staying: list[Holder], needed: Needs) -> str:
    steps = {step for holder in staying for _, step in holder.offers()}
    held = {name for holder in staying for name, _ in holder.offers()}
    if not any(one.whole or one.copies for one in staying):
        return "no surviving rank holds any state"
    if missing := needed.shards - held:
        divided = "" in missing or any(DIVIDED in name for name in missing)
        if divided:
            return "a lost rank was not a replica of any other: their states had become different"
        return f"no rank holds shard {', '.join(sorted(missing))}"
    lost = sorted(needed.at(max(steps)) - held)
    if lost:
        return f"no rank has a copy of what only a lost rank had ({', '.join(lost)})"
    return "all shards exist, but not at the same step"


def _join(holders: Iterable[Holder]) -> str:
    return ", ".join(str(held.rank) for held in holders)


def _replica(one: Holder | Placement) -> int:
    return one.replica if one.replica >= 0 else -1 - one.rank
