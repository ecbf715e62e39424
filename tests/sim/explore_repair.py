"""Exhaustive search over small jobs: `core/worker/machine.py` and `repair_plan.py` in
all interleavings.

A model of the training threads around the real machines. Each rank computes, enters the step's
collective, leaves it with the result (or without), passes the gate, updates, commits. Ranks die and
orders arrive at any of these points. The search visits every reachable state and checks in each:
is every held state what a job without faults would hold, do all ranks resume at the same step, and
is it the highest step that still existed?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, permutations, product

from taskd.core.manager.repair.repair_plan import Holder, Impossible, Placement, Plan, plan
from taskd.core.worker import machine, states
from taskd.core.worker.states import WorkerConfig
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.messages import Copy, Park, Parked, Repair
from taskd.model.worker import (
    AbortCollectives,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    SendToManager,
    StepFailed,
    ThreadParked,
)

CONFIG = WorkerConfig()
NODE = NodeRank(0)

COMPUTING, ENTERED, REDUCED, UPDATING = "computing", "entered", "reduced", "updating"
PARKED, MEETING, MET, DONE = "parked", "meeting", "met", "done"


@dataclass(frozen=True)
class Proc:
    """One incarnation of one rank: its machine, and the position of its training thread."""

    rank: int
    incarnation: int
    machine: states.State
    thread: str
    held: int | None
    """The step whose state it holds; None: no state, or a half-updated one."""
    group: int
    """The incident under which its group was formed."""
    aborted: bool = False
    inbox: tuple[Park | Repair, ...] = ()
    plan: Repair | None = None
    copying: int = -1
    """The step that is being copied to a snapshot (`explore_sharded.py`); -1: none."""
    both: bool = False
    """It is parked inside a step, and can still finish or undo it."""

    def key(self, place: Places) -> tuple[object, ...]:
        """Everything that its future depends on, except its rank number."""
        pending = tuple((type(order).__name__, order.incident) for order in self.inbox)
        machine_ = self.machine
        at = getattr(machine_, "at", None)
        copies = at.copies if at else getattr(machine_, "copies", ())
        return (
            self.incarnation,
            type(machine_).__name__,
            machine_.incident,
            at and (at.step, at.whole, at.undo),
            _placed(copies, place),
            getattr(machine_, "plan", None) is not None,
            type(getattr(machine_, "report", None)).__name__,
            self.thread,
            self.held,
            self.group,
            self.aborted,
            pending,
            self.plan.incident if self.plan else None,
            self.copying,
            self.both,
        )


Places = Mapping[int, int]
"""The number that each rank gets when worlds are compared up to renumbering."""
Files = tuple[int, int]
"""The steps of the two copies that a rank has on its node; -1: none, or torn."""


@dataclass(frozen=True)
class World:
    procs: tuple[Proc, ...]
    """The running processes."""
    incarnations: tuple[int, ...]
    faults_left: int
    entered: frozenset[tuple[int, int, int]] = frozenset()
    """All entries into collectives so far: (group, step, rank)."""
    taken: frozenset[tuple[int, int]] = frozenset()
    """Which ranks have received their state: (incident, rank)."""
    incident: int = 0
    parked: tuple[Parked, ...] = ()
    plans: tuple[Repair, ...] = ()
    stale: bool = False
    """A rank has died since the order to park (`explore_sharded.py`)."""
    files: tuple[Files, ...] = ()
    """The snapshots in the node's memory, by rank; they survive the ranks."""

    @property
    def is_stopped(self) -> bool:
        return self.incident > (self.plans[-1].incident if self.plans else 0)

    def key(self) -> tuple[object, ...]:
        """Everything that its future depends on. Of worlds that differ only in rank numbers, one is
        enough: see `_plans`."""
        living = {proc.rank: proc for proc in self.procs}
        reports = {int(one.rank): one for one in self.parked}
        alike: dict[int, list[int]] = {}
        for rank in range(len(self.incarnations)):
            alike.setdefault(hash(self._look(rank, living, reports)), []).append(rank)
        orders = product(*(permutations(alike[look]) for look in sorted(alike)))
        keys = (self._ordered(tuple(chain(*order)), living, reports) for order in orders)
        return min(keys, key=hash)

    def _ordered(
        self, order: tuple[int, ...], living: Mapping[int, Proc], reports: Mapping[int, Parked]
    ) -> tuple[object, ...]:
        """The same world with its ranks numbered in this order."""
        place = {rank: at for at, rank in enumerate(order)}
        used = {proc.group for proc in self.procs} | {
            int(one.incident)
            for proc in self.procs
            for one in (proc.plan, getattr(proc.machine, "plan", None), *proc.inbox)
            if isinstance(one, Repair)
        }
        return (
            self.faults_left,
            self.incident,
            self.is_stopped,
            self.stale,
            tuple(self._seen(rank, living, reports, place) for rank in order),
            frozenset((at, step, place[rank]) for at, step, rank in self.entered if at in used),
            frozenset((at, place[rank]) for at, rank in self.taken if at in used),
            tuple(_drawn(one, place) for one in self.plans if one.incident in used),
        )

    def _look(
        self, rank: int, living: Mapping[int, Proc], reports: Mapping[int, Parked]
    ) -> tuple[object, ...]:
        """What distinguishes this rank from others, independent of rank numbers."""
        proc, said = living.get(rank), reports.get(rank)
        return (
            proc and (proc.thread, proc.held, proc.group, proc.copying, len(proc.inbox)),
            proc and (type(proc.machine).__name__, proc.machine.incident, proc.aborted),
            said and (said.step, said.whole),
            self.incarnations[rank],
            self.files[rank] if self.files else None,
        )

    def _seen(
        self, rank: int, living: Mapping[int, Proc], reports: Mapping[int, Parked], place: Places
    ) -> tuple[object, ...]:
        proc, said = living.get(rank), reports.get(rank)
        return (
            proc and proc.key(place),
            said and (said.step, said.whole, said.undo, _placed(said.copies, place)),
            self.incarnations[rank],
            self.files[rank] if self.files else None,
        )


def _placed(copies: Iterable[Copy], place: Places) -> frozenset[tuple[int, int]]:
    """A shard has the name of its rank."""
    return frozenset((place[int(one.shard.split()[-1])], int(one.step)) for one in copies)


def _drawn(plan_: Repair, place: Places) -> tuple[object, ...]:
    given = frozenset((place[taker], place[giver]) for taker, giver in plan_.sources.items())
    return plan_.incident, plan_.resume, given


@dataclass
class Explorer:
    ranks: int
    faults: int
    steps: int
    visited: set[int] = field(default_factory=set)
    """Compared by hash: among a few million worlds a collision is not to be expected."""
    endings: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Returns the number of states. Raises at the first that violates a check."""
        start = self._start()
        stack: list[tuple[World, tuple[str, ...]]] = [(start, ())]
        self.visited = {hash(start.key())}
        while stack:
            world, record = stack.pop()
            moved = False
            for what, after in self._moves(world, record):
                moved = True
                key = hash(after.key())
                if key not in self.visited:
                    self.visited.add(key)
                    stack.append((after, (*record, what)))
            if not moved:
                self._ended(world, record)
        return len(self.visited)

    def _start(self) -> World:
        procs = tuple(self._first(rank) for rank in range(self.ranks))
        return World(procs, (0,) * self.ranks, self.faults)

    def _first(self, rank: int) -> Proc:
        me = Identity(Rank(rank), NODE, Incarnation(0), 0)
        return Proc(rank, 0, states.Training(me, Incident(0)), COMPUTING, 0, 0)

    # What can happen next

    def _moves(self, world: World, record: tuple[str, ...]) -> Iterator[tuple[str, World]]:
        for proc in world.procs:
            if proc.inbox:
                order, rest = proc.inbox[0], proc.inbox[1:]
                heard = self._hear(world, replace(proc, inbox=rest), order)
                yield f"{proc.rank} receives {type(order).__name__}", self._put(world, proc, *heard)
            for what, event_proc, said in self._thread(world, proc, record):
                yield f"{proc.rank} {what}", self._put(world, proc, event_proc, said, what)
            if world.faults_left and proc.thread != DONE:
                yield from self._deaths(world, proc)
        if self._someone_is_missing(world):
            yield "the manager stops all", self._stop(world)
        for planned in self._planned(world, record):
            yield "the manager plans", planned

    def _hear(
        self, world: World, proc: Proc, order: Park | Repair
    ) -> tuple[Proc, tuple[object, ...]]:
        return deliver(proc, order)

    def _deaths(self, world: World, proc: Proc) -> Iterator[tuple[str, World]]:
        yield f"{proc.rank} dies", _die(world, proc)

    def _thread(
        self, world: World, proc: Proc, record: tuple[str, ...]
    ) -> Iterator[tuple[str, Proc, tuple[object, ...]]]:
        members = self._members(world, proc.group)
        match proc.thread:
            case "computing" if proc.aborted:
                yield self._park(world, proc)
            case "computing":
                yield "enters", replace(proc, thread=ENTERED), ()
            case "entered":
                here = {r for g, s, r in world.entered if (g, s) == (proc.group, proc.held)}
                if here >= members:
                    self._check_collective(world, proc, members, record)
                    last = proc.held == self.steps
                    yield "has reduced", replace(proc, thread=DONE if last else REDUCED), ()
                if proc.aborted:
                    yield self._park(world, proc)
                elif self._is_broken(world, proc.group):
                    failed, said = deliver(
                        proc, StepFailed(FaultCause.COMMUNICATION, "a peer is lost")
                    )
                    what, at, more = self._park(world, failed)
                    yield f"fails and {what}", at, said + more
            case "reduced" if proc.aborted:
                yield self._park(world, proc)
            case "reduced":
                yield "passes the gate", replace(proc, thread=UPDATING), ()
            case "updating":
                assert proc.held is not None
                stepped = replace(proc, thread=COMPUTING, held=proc.held + 1)
                if isinstance(proc.machine, states.Resumed):
                    yield "commits", *deliver(stepped, FirstStepCommitted(Step(proc.held + 1)))
                else:
                    yield "commits", stepped, ()
            case "meeting" | "met":
                yield from self._meeting(world, proc, record)
            case _:
                return

    def _park(self, world: World, proc: Proc) -> tuple[str, Proc, tuple[object, ...]]:
        held = proc.held
        at = ThreadParked(Step(held or 0), whole=held is not None)
        waiting = replace(proc, thread=PARKED, aborted=False)
        return ("parks", *deliver(waiting, at))

    def _meeting(
        self, world: World, proc: Proc, record: tuple[str, ...]
    ) -> Iterator[tuple[str, Proc, tuple[object, ...]]]:
        plan_ = proc.plan
        assert plan_ is not None
        there = {
            one.rank: one
            for one in world.procs
            if one.plan is not None
            and one.plan.incident == plan_.incident
            and one.thread in (MEETING, MET)
        }
        members = {int(member.rank) for member in plan_.members}
        gone = members - {one.rank for one in world.procs}
        if proc.aborted or gone:
            broken = replace(proc, plan=None, aborted=False)
            abandoned, said = deliver(broken, LocalRepairFailed(plan_.incident, "a peer is lost"))
            what, at, more = self._park(world, abandoned)
            yield f"abandons the plan and {what}", at, said + more
            return
        if proc.thread == MEETING and (members <= set(there) or self._all_met(world, plan_)):
            source = plan_.sources.get(Rank(proc.rank))
            held = proc.held
            if source is not None:
                giver = there.get(int(source))
                if giver is None:
                    return
                assert giver.held == plan_.resume, tale("the source holds another step", record)
                held = giver.held
            assert held == plan_.resume, tale(f"rank {proc.rank} resumes wrongly", record)
            yield "has its state", replace(proc, thread=MET, held=held), ()
        takers = {int(taker) for taker, giver in plan_.sources.items() if giver == proc.rank}
        given = all((plan_.incident, taker) in world.taken for taker in takers)
        if proc.thread == MET and given:
            repaired = replace(proc, thread=COMPUTING, group=plan_.incident, plan=None)
            done = LocalRepairDone(plan_.incident, Step(plan_.resume))
            yield "is repaired", *deliver(repaired, done)

    def _all_met(self, world: World, plan_: Repair) -> bool:
        """The group forms once all members have come; some may have continued since."""
        return any(one.group == plan_.incident for one in world.procs) or any(
            one.thread == MET and one.plan is not None and one.plan.incident == plan_.incident
            for one in world.procs
        )

    def _is_broken(self, world: World, group: int) -> bool:
        """A member has died, or has left this group for another incident."""
        incarnations = {(one.rank, one.incarnation): one for one in world.procs}
        for member in self._lives(world, group):
            there = incarnations.get(member)
            if there is None or there.machine.incident > group:
                return True
            if there.group == group and there.thread == PARKED:
                return True
        return False

    def _lives(self, world: World, group: int) -> set[tuple[int, int]]:
        for plan_ in world.plans:
            if plan_.incident == group:
                return {(int(one.rank), int(one.incarnation)) for one in plan_.members}
        return {(rank, 0) for rank in range(self.ranks)}

    def _members(self, world: World, group: int) -> set[int]:
        return {rank for rank, _ in self._lives(world, group)}

    def _put(
        self, world: World, before: Proc, after: Proc, said: tuple[object, ...], what: str = ""
    ) -> World:
        procs = tuple(after if proc is before else proc for proc in world.procs)
        world = replace(world, procs=procs)
        if what == "enters":
            assert after.held is not None
            world = replace(world, entered=world.entered | {(after.group, after.held, after.rank)})
        if what == "has its state" and after.plan is not None:
            world = replace(world, taken=world.taken | {(int(after.plan.incident), after.rank)})
        for body in said:
            if isinstance(body, Parked) and body.incident == world.incident:
                rest = tuple(one for one in world.parked if one.rank != body.rank)
                world = replace(world, parked=(*rest, body))
        return world

    # A minimal manager

    def _someone_is_missing(self, world: World) -> bool:
        living = {proc.rank for proc in world.procs}
        faulted = [p for p in world.procs if isinstance(p.machine, states.Faulted)]
        return not world.is_stopped and (len(living) < self.ranks or bool(faulted))

    def _stop(self, world: World) -> World:
        incident = world.incident + 1
        order = Park(Incident(incident), "a rank is missing")
        procs = tuple(
            proc if proc.thread == DONE else replace(proc, inbox=(*proc.inbox, order))
            for proc in world.procs
        )
        return replace(world, incident=incident, parked=(), procs=procs)

    def _planned(self, world: World, record: tuple[str, ...]) -> Iterator[World]:
        if not world.is_stopped:
            return
        reports = {int(parked.rank): parked for parked in world.parked}
        living = {proc.rank: proc for proc in world.procs if proc.thread != DONE}
        if not set(living) <= set(reports):
            return
        holders = [self._holder(p, reports[r]) for r, p in living.items()]
        missing = [r for r in range(self.ranks) if r not in living]
        placements = [
            Placement(Rank(r), NODE, Incarnation(world.incarnations[r] + 1), self._shard(r))
            for r in missing
        ]
        for made in _plans(holders, placements, self.ranks):
            if isinstance(made, Impossible):
                self._is_lost(world, holders, record)
                continue
            self._is_the_best(made.resume, list(living.values()), record)
            yield self._ordered(world, made, living.values())

    def _ordered(self, world: World, made: Plan, living: Iterable[Proc]) -> World:
        repair = Repair(
            Incident(world.incident), "recover", made.members, made.resume, made.sources, "", 60.0
        )
        incarnations = list(world.incarnations)
        new = {one.rank for one in made.replaced}
        procs = [replace(p, inbox=(*p.inbox, repair)) for p in living if p.rank not in new]
        for placement in made.replaced:
            incarnations[placement.rank] += 1
            me = Identity(placement.rank, NODE, placement.incarnation, 0)
            fresh = states.Joining(me, Incident(world.incident))
            procs.append(
                Proc(
                    placement.rank,
                    placement.incarnation,
                    fresh,
                    COMPUTING,
                    None,
                    -1,
                    True,
                    (repair,),
                )
            )
        procs.sort(key=lambda proc: proc.rank)
        plans = (*world.plans, repair)
        return replace(
            world, procs=tuple(procs), incarnations=tuple(incarnations), plans=plans, parked=()
        )

    def _holder(self, proc: Proc, report: Parked) -> Holder:
        return Holder(
            Rank(proc.rank), NODE, Incarnation(proc.incarnation), report.step, whole=report.whole
        )

    def _shard(self, rank: int) -> str:
        return ""

    # What must hold

    def _is_lost(self, world: World, holders: list[Holder], record: tuple[str, ...]) -> None:
        assert all(not holder.whole for holder in holders), tale("a holder is left", record)
        left = any(proc.thread == DONE for proc in world.procs)
        assert left or world.faults_left == 0, tale(
            "state is lost although it could be kept", record
        )
        self.endings.add("lost at the end" if left else "no surviving rank holds any state")

    def _is_the_best(self, resume: int, living: list[Proc], record: tuple[str, ...]) -> None:
        best = max(proc.held for proc in living if proc.held is not None)
        assert resume == best, tale(f"step {best} is lost, {resume} is not", record)

    def _check_collective(
        self, world: World, proc: Proc, members: set[int], record: tuple[str, ...]
    ) -> None:
        """Every running rank that took part still holds this step or the next one."""
        for other in world.procs:
            if other.rank in members and other.group == proc.group and other.held is not None:
                assert proc.held is not None
                assert abs(other.held - proc.held) <= 1, tale("two steps apart", record)

    def _ended(self, world: World, record: tuple[str, ...]) -> None:
        if not world.procs:
            self.endings.add("no rank is left")
            return
        if all(proc.thread == DONE for proc in world.procs):
            assert {proc.held for proc in world.procs} == {self.steps}, tale("not all", record)
            self.endings.add("trained")
            return
        holders = [proc for proc in world.procs if proc.held is not None]
        assert not holders, tale(f"stuck: {world.procs}", record)


def _plans(
    holders: list[Holder], placements: list[Placement], ranks: int
) -> list[Plan | Impossible]:
    """The plan and all equivalent ones: among equal ranks the plan chooses by rank number, so all
    permutations of the numbers are tried."""
    found: dict[object, Plan | Impossible] = {}
    for names in permutations(map(Rank, range(ranks))):
        real = {name: Rank(rank) for rank, name in enumerate(names)}
        made = plan(
            [replace(one, rank=names[one.rank]) for one in holders],
            [replace(one, rank=names[one.rank]) for one in placements],
        )
        if isinstance(made, Plan):
            made = replace(
                made,
                members=tuple(replace(one, rank=real[one.rank]) for one in made.members),
                replaced=tuple(replace(one, rank=real[one.rank]) for one in made.replaced),
                sources={real[taker]: real[giver] for taker, giver in made.sources.items()},
            )
            found.setdefault((made.resume, frozenset(made.sources.items())), made)
        else:
            found.setdefault(None, made)
    return list(found.values())


def deliver(proc: Proc, event: Event) -> tuple[Proc, tuple[object, ...]]:
    """Run the real machine; its commands change the thread, its messages go to the manager."""
    outcome = machine.step(proc.machine, event, 0.0, CONFIG)
    proc, said = replace(proc, machine=outcome.state), []
    for command in outcome.commands:
        match command:
            case AbortCollectives():
                if proc.thread != PARKED:
                    proc = replace(proc, aborted=True)
            case ExecuteOrder(order) if isinstance(order, Repair):
                proc = replace(proc, plan=order, thread=MEETING)
            case SendToManager(body):
                said.append(body)
            case _:
                raise AssertionError(f"{command} is not part of this model")
    return proc, tuple(said)


def _die(world: World, victim: Proc) -> World:
    procs = tuple(proc for proc in world.procs if proc is not victim)
    parked = tuple(one for one in world.parked if one.rank != victim.rank)
    return replace(world, procs=procs, parked=parked, faults_left=world.faults_left - 1)


def tale(what: str, record: tuple[str, ...]) -> str:
    return "\n  ".join([what, *record])
