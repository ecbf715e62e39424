"""Exhaustive search: who leads a job, with `Candidacy` and `Fence` on a model of etcd.

Three candidates, two agents. etcd is a model: every call takes effect at one moment, at any time
after it was sent, or its answer is lost. A lease ends when its leader is dead, has lost its answer,
or has stopped to lead by its own clock, which is always earlier (`Tenure`). A leader that was
stopped has already sent something: its writes and orders arrive at any time, also much later.

Checked in each state: at most one leader may act; no write of a former leader takes effect; no
agent obeys a former leader once a later one has decided.

States that differ only in what can have no effect any more are searched once (`canonical`): a
write or an order that can only be refused, the names of agents, and those of candidates. Candidate
0 keeps its name until the first term has begun, because it must be the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from taskd.core.election import Candidacy, Claim, Fence, Follow, Term, TermsSeen

Record = tuple["Record", str] | None
"""The moves that led to a state: the last one, and those before it."""
WATCHING, CLAIMING, LEADING, DEAD = "watching", "claiming", "leading", "dead"
AGENTS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    status: str = WATCHING
    newest: int = 0
    """The newest epoch that it has seen."""
    epoch: int = 0
    """Of the term that it claims or leads."""
    may_act: bool = False
    """By its own clock."""
    joined: frozenset[int] = frozenset()
    wrote: bool = False


@dataclass(frozen=True, slots=True)
class World:
    candidates: tuple[Candidate, ...]
    faults_left: int
    leader: int = 0
    """The epoch in etcd's leader key; 0: there is none."""
    owner: int = 0
    epoch: int = 0
    version: int = 0
    """Of the job's record."""
    decided: int = 0
    """The epoch of the last decision in the record."""
    writes: frozenset[tuple[int, int, int]] = frozenset()
    """On their way: candidate, epoch, version to replace."""
    orders: frozenset[tuple[int, int]] = frozenset()
    """On their way: epoch, agent."""
    fences: tuple[int, ...] = (0,) * AGENTS


@dataclass(frozen=True, slots=True)
class Rules:
    """What a planted bug replaces."""

    fence: Callable[[int, int], tuple[bool, int]]
    checks_lease: bool = True
    """A write depends on the leader key."""
    waits_for_agents: bool = True
    """A leader decides only about agents that have joined it."""
    stops_in_time: bool = True
    """A leader stops before its lease can end."""


def real_fence(before: int, epoch: int) -> tuple[bool, int]:
    fence = Fence()
    fence.epoch = before
    return fence.admits(epoch), fence.epoch


class TermsExplorer:
    def __init__(
        self,
        candidates: int,
        faults: int,
        terms: int = 3,
        rules: Rules | None = None,
        *,
        reduced: bool = True,
    ) -> None:
        """`reduced`: search only one of several states that cannot be told apart."""
        self.start = World((Candidate(),) * candidates, faults)
        self.terms, self.rules, self.reduced = terms, rules or Rules(real_fence), reduced
        self.visited: set[World] = set()
        self.endings: set[str] = set()

    def run(self) -> int:
        stack: list[tuple[World, Record]] = [(self.start, None)]
        self.visited = {self.start}
        while stack:
            world, record = stack.pop()
            for what, after in self._moves(world, record):
                self._check(after, (record, what))
                if self.reduced:
                    after = self.canonical(after)
                if after not in self.visited:
                    self.visited.add(after)
                    stack.append((after, (record, what)))
        return len(self.visited)

    # States that cannot be told apart

    def canonical(self, world: World) -> World:
        world = self._without_what_has_no_effect(world)
        fixed = 0 if world.epoch else 1  # candidate 0 must begin the first term
        count = len(world.candidates)
        orders = ((*range(fixed), *rest) for rest in permutations(range(fixed, count)))
        agents = tuple(permutations(range(AGENTS)))
        return min(
            (_renamed(world, order, agent) for order in orders for agent in agents), key=_sort_key
        )

    def _without_what_has_no_effect(self, world: World) -> World:
        """What is refused now always is: epochs, versions and fences only grow."""
        candidates = tuple(replace(one, newest=0) for one in world.candidates)
        assert all(one.newest <= world.epoch for one in world.candidates)
        led = {world.leader} if self.rules.checks_lease else set(range(self.terms + 1))
        writes = frozenset(
            (at, epoch, 0)
            for at, epoch, version in world.writes
            if version == world.version and epoch in led
        )
        orders = set[tuple[int, int]]()
        for epoch, agent in world.orders:
            if self.rules.fence(world.fences[agent], epoch)[0]:
                orders.add((epoch, agent))
            else:
                self.endings.add("an old order is refused")
        return replace(
            world,
            candidates=candidates,
            owner=world.owner if world.leader else 0,
            version=0,
            writes=writes,
            orders=frozenset(orders),
        )

    # Moves

    def _moves(self, world: World, record: Record) -> Iterator[tuple[str, World]]:
        for at, one in enumerate(world.candidates):
            match one.status:
                case "watching":
                    yield from self._looks(world, at)
                case "claiming":
                    yield from self._claims(world, at)
                case "leading":
                    yield from self._leads(world, at)
                case _:
                    pass
            if world.faults_left and one.status != DEAD:
                yield f"{at} dies", self._fault(world, at, Candidate(DEAD))
        if world.leader and self._lease_may_end(world):
            yield "the lease ends", replace(world, leader=0)
        for write in world.writes:
            yield self._write_arrives(world, write)
        for order in world.orders:
            yield self._order_arrives(world, order, record)

    def _set(self, world: World, at: int, one: Candidate) -> World:
        candidates = (*world.candidates[:at], one, *world.candidates[at + 1 :])
        return replace(world, candidates=candidates)

    def _fault(self, world: World, at: int, one: Candidate) -> World:
        return replace(self._set(world, at, one), faults_left=world.faults_left - 1)

    # A candidate

    def _looks(self, world: World, at: int) -> Iterator[tuple[str, World]]:
        one = world.candidates[at]
        candidacy = Candidacy(at)
        candidacy._newest = one.newest
        term = Term(world.leader, world.owner, "", "") if world.leader else None
        match candidacy.consider(TermsSeen(term, world.epoch, 0)):
            case Claim(epoch) if epoch <= self.terms:
                claiming = Candidate(CLAIMING, candidacy._newest, epoch)
                yield f"{at} sees no leader", self._set(world, at, claiming)
            case Follow():
                seen = replace(one, newest=candidacy._newest)
                yield f"{at} sees the leader", self._set(world, at, seen)
            case _:
                return

    def _claims(self, world: World, at: int) -> Iterator[tuple[str, World]]:
        one = world.candidates[at]
        if world.leader or world.epoch != one.epoch - 1:
            yield f"{at} is too late", self._set(world, at, Candidate(newest=one.newest))
            return
        taken = replace(world, leader=one.epoch, owner=at, epoch=one.epoch)
        leads = Candidate(LEADING, one.epoch, one.epoch, may_act=True)
        yield f"{at} leads epoch {one.epoch}", self._set(taken, at, leads)
        if world.faults_left:
            unknown = Candidate(newest=one.newest)
            yield f"the answer to {at} is lost", self._fault(taken, at, unknown)

    def _leads(self, world: World, at: int) -> Iterator[tuple[str, World]]:
        one = world.candidates[at]
        if not one.may_act:
            yield f"{at} notices", self._set(world, at, Candidate())
            return
        if world.faults_left:
            stopped = replace(one, may_act=False)
            yield f"{at} is stopped for too long", self._fault(world, at, stopped)
        for agent in range(AGENTS):
            if agent not in one.joined:
                admitted, fence = self.rules.fence(world.fences[agent], one.epoch)
                if admitted:
                    fences = (*world.fences[:agent], fence, *world.fences[agent + 1 :])
                    joined = replace(one, joined=one.joined | {agent})
                    after = replace(self._set(world, at, joined), fences=fences)
                    yield f"agent {agent} joins {at}", after
        if not one.wrote and (len(one.joined) == AGENTS or not self.rules.waits_for_agents):
            writes = world.writes | {(at, one.epoch, world.version)}
            sent = replace(self._set(world, at, replace(one, wrote=True)), writes=writes)
            yield f"{at} decides", sent

    # etcd, and what is on its way

    def _lease_may_end(self, world: World) -> bool:
        owner = world.candidates[world.owner]
        holds = owner.status == LEADING and owner.epoch == world.leader and owner.may_act
        return not holds or not self.rules.stops_in_time

    def _write_arrives(self, world: World, write: tuple[int, int, int]) -> tuple[str, World]:
        at, epoch, version = write
        world = replace(world, writes=world.writes - {write})
        led = world.leader == epoch or not self.rules.checks_lease
        if not (led and world.version == version):
            return f"the write of {at} is refused", world
        orders = world.orders
        one = world.candidates[at]
        if one.status == LEADING and one.epoch == epoch:
            orders = orders | {(epoch, agent) for agent in range(AGENTS)}
        self.endings.add(f"epoch {epoch} decides")
        after = replace(world, version=version + 1, orders=orders)
        if epoch < world.epoch:
            raise AssertionError(f"epoch {epoch} writes after epoch {world.epoch} has begun")
        return f"epoch {epoch} is decided", replace(after, decided=epoch)

    def _order_arrives(
        self, world: World, order: tuple[int, int], record: Record
    ) -> tuple[str, World]:
        epoch, agent = order
        admitted, fence = self.rules.fence(world.fences[agent], epoch)
        fences = (*world.fences[:agent], fence, *world.fences[agent + 1 :])
        if admitted and epoch < world.decided:
            raise AssertionError(
                f"agent {agent} obeys epoch {epoch} after {world.decided} decided:{tale(record)}"
            )
        if not admitted:
            self.endings.add("an old order is refused")
        after = replace(world, orders=world.orders - {order}, fences=fences)
        return f"agent {agent} hears epoch {epoch}", after

    def _check(self, world: World, record: Record) -> None:
        acting = [one for one in world.candidates if one.status == LEADING and one.may_act]
        assert len(acting) <= 1, f"two leaders may act:{tale(record)}"


def _renamed(world: World, candidates: tuple[int, ...], agents: tuple[int, ...]) -> World:
    """The candidate in place n is now the one that was in place `candidates[n]`."""
    at = {old: new for new, old in enumerate(candidates)}
    agent = {old: new for new, old in enumerate(agents)}
    moved = (world.candidates[old] for old in candidates)
    return replace(
        world,
        candidates=tuple(
            replace(one, joined=frozenset(agent[joined] for joined in one.joined)) for one in moved
        ),
        owner=at[world.owner] if world.leader else 0,
        writes=frozenset((at[a], epoch, version) for a, epoch, version in world.writes),
        orders=frozenset((epoch, agent[a]) for epoch, a in world.orders),
        fences=tuple(world.fences[old] for old in agents),
    )


def _sort_key(world: World) -> tuple[object, ...]:
    return (
        *((one.status, one.epoch, one.may_act, one.wrote) for one in world.candidates),
        *(tuple(sorted(one.joined)) for one in world.candidates),
        world.owner,
        tuple(sorted(world.writes)),
        tuple(sorted(world.orders)),
        world.fences,
    )


def tale(record: Record) -> str:
    moves = []
    while record is not None:
        record, what = record
        moves.append(what)
    return "".join(f"\n  {what}" for what in reversed(moves))
