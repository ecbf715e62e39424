"""Exhaustive search over everything that can happen to one rank, in every interleaving.

The world models what the training thread really does. The manager sends any order, in any
sequence, twice or never; deadlines pass at any time. Every command of the machine is checked
against the state of the thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from taskd.core.worker import states
from taskd.core.worker.machine import step
from taskd.core.worker.states import State, WorkerConfig
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.types import Tick
from taskd.model.worker import (
    AbortCollectives,
    Command,
    DumpFinished,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    GiveUp,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    ManagerConnected,
    Order,
    SendToManager,
    StepFailed,
    ThreadParked,
)

ME = Identity(Rank(0), NodeRank(0), Incarnation(0), 1)
MEMBER = m.Member(ME.rank, ME.node, ME.incarnation)
PARKED = ThreadParked(Step(1), whole=True)
CONFIG = WorkerConfig()
LATE = 1e9
PENDING = 3
"""How many events of the training thread may be in flight at once; it never sends more."""


@dataclass(frozen=True)
class World:
    state: State
    thread: str = "running"
    """running, leaving, parked, repairing N, dumping N, gone"""
    events: tuple[Event, ...] = ()
    """From the training thread to the machine, in order."""
    orders: tuple[Order | GiveUp, ...] = ()
    aborted: int = 0
    """The newest incident that the groups were aborted for."""
    unproven: bool = False
    """Repaired, and no step committed since."""


def orders(incidents: int) -> list[Event]:
    sent: list[Event] = []
    for number in range(1, incidents + 1):
        one = Incident(number)
        sent += [
            m.Park(one, ""),
            m.Repair(one, "retry", (MEMBER,), Step(1), {}, "", 30.0),
            m.Dump(one, Step(1), "", (MEMBER,)),
            m.Leave(one, ""),
        ]
    return sent


def successors(world: World, sent: list[Event]) -> Iterator[tuple[str, World]]:
    """All next worlds, with the event that leads to each."""
    for event in (*sent, ManagerConnected(Step(1)), Tick()):
        yield f"{event}", hear(world, event)
    if world.events:
        said, rest = world.events[0], world.events[1:]
        yield f"received {said}", hear(replace(world, events=rest), said)
    if len(world.events) < PENDING:
        yield from _thread(world)


def _thread(world: World) -> Iterator[tuple[str, World]]:
    events = world.events
    match world.thread.split():
        case ["running"]:
            failed = StepFailed(FaultCause.COMMUNICATION, "")
            yield "a collective fails", replace(world, thread="leaving", events=(*events, failed))
            if world.aborted:
                yield "leaves its step", replace(world, thread="leaving")
            if world.unproven:
                stepped = (*events, FirstStepCommitted(Step(2)))
                yield "commits", replace(world, events=stepped, unproven=False)
        case ["leaving"]:
            yield "parks", replace(world, thread="parked", events=(*events, PARKED))
        case ["parked"] if world.orders:
            order, rest = world.orders[0], world.orders[1:]
            yield f"takes {order}", replace(world, thread=_begin(order), orders=rest)
        case ["repairing", number]:
            incident = Incident(int(number))
            broke = (*events, LocalRepairFailed(incident, ""))
            yield "cannot repair", replace(world, thread="leaving", events=broke)
            if world.aborted <= incident:
                repaired = (*events, LocalRepairDone(incident, Step(1)))
                after = replace(world, thread="running", events=repaired, aborted=0, unproven=True)
                yield "has repaired", after
        case ["dumping", number]:
            wrote = (*events, DumpFinished(Incident(int(number)), Step(1)))
            yield "has written", replace(world, thread="gone", events=wrote)
        case _:
            pass


def _begin(order: Order | GiveUp) -> str:
    match order:
        case m.Repair(incident=incident):
            return f"repairing {incident}"
        case m.Dump(incident=incident):
            return f"dumping {incident}"
        case _:
            return "gone"


def hear(world: World, event: Event) -> World:
    outcome = step(world.state, event, LATE if isinstance(event, Tick) else 0.0, CONFIG)
    before, after = type(world.state), type(outcome.state)
    if outcome.state != world.state:
        assert after in states.LEGAL[before], (
            f"{before.__name__} -> {after.__name__} is not in LEGAL"
        )
    world = replace(world, state=outcome.state)
    for command in outcome.commands:
        world = _perform(world, command)
    return world


def _perform(world: World, command: Command) -> World:
    match command:
        case AbortCollectives(incident=incident):
            return replace(world, aborted=max(world.aborted, incident))
        case ExecuteOrder(order=order):
            assert isinstance(order, m.Leave) or world.thread == "parked", (
                f"an order for a thread that is {world.thread}"
            )
            return replace(world, orders=(*world.orders, order))
        case GiveUp():
            return replace(world, orders=(*world.orders, command))
        case SendToManager(body=m.Parked(whole=True)):
            assert world.thread == "parked", f"sent Parked while {world.thread}"
            return world
        case SendToManager():
            return world


def check(world: World) -> None:
    """What must hold when no message is in flight."""
    if world.thread == "parked" and not world.events and not world.orders:
        waits = isinstance(world.state, states.Parked) or (
            isinstance(world.state, states.Faulted) and world.state.at is not None
        )
        assert waits or isinstance(world.state, states.Leaving), (
            f"the thread is parked forever: {world.state}"
        )
    if world.thread == "running" and not world.events and not world.aborted:
        wrong = (states.Parked, states.Repairing, states.Joining)
        assert not isinstance(world.state, wrong), f"it trains, but is {world.state}"


@dataclass
class Explored:
    worlds: int
    edges: set[tuple[type[State], type[State]]]


def explore(start: World, incidents: int) -> Explored:
    """Breadth first, so that a counterexample is short; its trace is the error message."""
    sent = orders(incidents)
    came: Came = {repr(start): None}
    edges: set[tuple[type[State], type[State]]] = set()
    todo = deque([start])
    while todo:
        world = todo.popleft()
        try:
            check(world)
            steps = list(successors(world, sent))
        except AssertionError as broken:
            raise AssertionError("\n".join([str(broken), *_story(world, came)])) from None
        for what, following in steps:
            if type(following.state) is not type(world.state):
                edges.add((type(world.state), type(following.state)))
            if repr(following) not in came:
                came[repr(following)] = (world, what)
                todo.append(following)
    return Explored(len(came), edges)


Came = dict[str, tuple[World, str] | None]
"""The predecessor of each world. A plan contains a dict, so worlds are compared by repr."""


def _story(world: World, came: Came) -> list[str]:
    trace = []
    at: World | None = world
    while at is not None:
        previous = came[repr(at)]
        if previous is None:
            break
        at, what = previous
        trace.append(what)
    return trace[::-1]
