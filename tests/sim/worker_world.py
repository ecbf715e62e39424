"""One rank and everything that can happen to it, explored to the last interleaving.

The truth is what the training thread really does; the machine only believes. The manager sends
whatever it likes, in any order, twice or never; deadlines pass at any moment. Every command is held
against the truth.
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
STOOD = ThreadParked(Step(1), whole=True)
CONFIG = WorkerConfig()
LATE = 1e9
PENDING = 3
"""How many words of the training thread may be on their way at once: it never says more."""


@dataclass(frozen=True)
class World:
    state: State
    thread: str = "running"
    """running, leaving, standing, repairing N, dumping N, gone"""
    words: tuple[Event, ...] = ()
    """From the training thread to the machine, in order."""
    orders: tuple[Order | GiveUp, ...] = ()
    aborted: int = 0
    """The newest incident that the groups were aborted for."""
    unproven: bool = False
    """Repaired, and no step committed since."""


def orders(incidents: int) -> list[Event]:
    told: list[Event] = []
    for number in range(1, incidents + 1):
        one = Incident(number)
        told += [
            m.Park(one, ""),
            m.Repair(one, "retry", (MEMBER,), Step(1), {}, "", 30.0),
            m.Dump(one, Step(1), "", (MEMBER,)),
            m.Leave(one, ""),
        ]
    return told


def successors(world: World, told: list[Event]) -> Iterator[tuple[str, World]]:
    """Every next world, and what happened on the way to it."""
    for event in (*told, ManagerConnected(Step(1)), Tick()):
        yield f"{event}", hear(world, event)
    if world.words:
        said, rest = world.words[0], world.words[1:]
        yield f"heard {said}", hear(replace(world, words=rest), said)
    if len(world.words) < PENDING:
        yield from _thread(world)


def _thread(world: World) -> Iterator[tuple[str, World]]:
    words = world.words
    match world.thread.split():
        case ["running"]:
            failed = StepFailed(FaultCause.COMMUNICATION, "")
            yield "a collective fails", replace(world, thread="leaving", words=(*words, failed))
            if world.aborted:
                yield "leaves its step", replace(world, thread="leaving")
            if world.unproven:
                stepped = (*words, FirstStepCommitted(Step(2)))
                yield "commits", replace(world, words=stepped, unproven=False)
        case ["leaving"]:
            yield "stands", replace(world, thread="standing", words=(*words, STOOD))
        case ["standing"] if world.orders:
            order, rest = world.orders[0], world.orders[1:]
            yield f"takes {order}", replace(world, thread=_begin(order), orders=rest)
        case ["repairing", number]:
            incident = Incident(int(number))
            broke = (*words, LocalRepairFailed(incident, ""))
            yield "cannot repair", replace(world, thread="leaving", words=broke)
            if world.aborted <= incident:
                mended = (*words, LocalRepairDone(incident, Step(1)))
                after = replace(world, thread="running", words=mended, aborted=0, unproven=True)
                yield "has repaired", after
        case ["dumping", number]:
            wrote = (*words, DumpFinished(Incident(int(number)), Step(1)))
            yield "has written", replace(world, thread="gone", words=wrote)
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
        assert after in states.LEGAL[before], f"{before.__name__} -> {after.__name__} is not drawn"
    world = replace(world, state=outcome.state)
    for command in outcome.commands:
        world = _perform(world, command)
    return world


def _perform(world: World, command: Command) -> World:
    match command:
        case AbortCollectives(incident=incident):
            return replace(world, aborted=max(world.aborted, incident))
        case ExecuteOrder(order=order):
            assert isinstance(order, m.Leave) or world.thread == "standing", (
                f"an order for a thread that is {world.thread}"
            )
            return replace(world, orders=(*world.orders, order))
        case GiveUp():
            return replace(world, orders=(*world.orders, command))
        case SendToManager(body=m.Parked(whole=True)):
            assert world.thread == "standing", f"said Parked while {world.thread}"
            return world
        case SendToManager():
            return world


def check(world: World) -> None:
    """What must hold wherever nothing is on its way."""
    if world.thread == "standing" and not world.words and not world.orders:
        waits = isinstance(world.state, states.Parked) or (
            isinstance(world.state, states.Faulted) and world.state.at is not None
        )
        assert waits or isinstance(world.state, states.Leaving), (
            f"the thread stands for ever: {world.state}"
        )
    if world.thread == "running" and not world.words and not world.aborted:
        wrong = (states.Parked, states.Repairing, states.Joining)
        assert not isinstance(world.state, wrong), f"it trains, but is {world.state}"


@dataclass
class Explored:
    worlds: int
    edges: set[tuple[type[State], type[State]]]


def explore(start: World, incidents: int) -> Explored:
    """Breadth first, so that a counterexample is as short as can be; its story is the message."""
    told = orders(incidents)
    came: Came = {repr(start): None}
    edges: set[tuple[type[State], type[State]]] = set()
    todo = deque([start])
    while todo:
        world = todo.popleft()
        try:
            check(world)
            steps = list(successors(world, told))
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
"""From where each world was first reached. A plan holds a dict, so worlds go by their text."""


def _story(world: World, came: Came) -> list[str]:
    story = []
    at: World | None = world
    while at is not None:
        previous = came[repr(at)]
        if previous is None:
            break
        at, what = previous
        story.append(what)
    return story[::-1]
