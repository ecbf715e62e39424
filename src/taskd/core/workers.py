"""One node's training processes: start, stop, replace some, give up.

    Waiting -> Training -> Stopping -> Over
       |           |                    ^
       +-----------+--------------------+

The manager decides for the job; this machine carries its orders out on one node, in an order that
is always safe: a rank's next life starts only after its last one is confirmed dead, and all of
an attempt's lives start only after every life of the attempt before is. Orders come twice, late,
or out of order: an older incident or attempt is refused, a repeated one is answered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import assert_never

from taskd.model import messages as m
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank
from taskd.model.workers import (
    AskToEnd,
    Command,
    Dying,
    Ended,
    Event,
    Interrupted,
    KillWorker,
    LinkDown,
    LinkUp,
    RenewStore,
    Running,
    SayHello,
    Started,
    StartFailed,
    Starting,
    StartWorker,
    Tell,
    Tick,
    Worker,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    permission_timeout_s: float = 900.0
    """How long the manager may take to permit the first start."""

    order_timeout_s: float = 600.0
    """How long a dead rank may wait for an order before the node gives up."""

    farewell_s: float = 600.0
    """How long a node whose ranks have all finished waits to be told that the job has ended."""

    in_ascends_words: bool = False
    """Tell of deaths in Ascend's words too, for a manager that knows no others."""

    grace_s: float = 30.0
    """How long workers may take to end after SIGTERM before they are killed."""

    def __post_init__(self) -> None:
        for name in ("permission_timeout_s", "order_timeout_s", "farewell_s", "grace_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


NO_INCIDENT = Incident(0)


Workers = Mapping[Rank, Worker]


# What the node is doing


@dataclass(frozen=True, slots=True)
class Node:
    """What stays true in every state."""

    node: NodeRank
    ranks: tuple[Rank, ...]
    """None at all on a spare node, until it is told to take over those of a lost one."""
    remaining: int
    """The restart budget."""
    attempt: int = 0
    incident: Incident = NO_INCIDENT


@dataclass(frozen=True, slots=True)
class Waiting:
    """For the manager's permission to start."""

    node: Node
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Training:
    node: Node
    workers: Workers
    pending: Mapping[Rank, Incarnation]
    """Lives to start as soon as what is in their way is dead."""
    together: bool
    """True: nothing pending starts before every old process of the node is dead."""
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Stopping:
    node: Node
    workers: Workers
    exit_code: int
    because: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Over:
    node: Node
    exit_code: int
    because: str
    workers: Workers = field(default_factory=dict)
    deadline: float = inf


State = Waiting | Training | Stopping | Over

LEGAL: dict[type[State], set[type[State]]] = {
    Waiting: {Training, Over},
    Training: {Training, Stopping, Over},
    Stopping: {Stopping, Over},
    Over: set(),
}


SIGTERM = 15


@dataclass(frozen=True, slots=True)
class Step:
    """The next state, what the outside must do to get there, and why."""

    state: State
    commands: tuple[Command, ...] = ()
    because: str = ""


def step(state: State, event: Event, now: float, config: WorkersConfig) -> Step:
    """Decide. Same state, same event, same time: same answer."""
    match state, event:
        case Over(), _:
            return Step(state, because="the node's part of the job is over")
        case Waiting(Node(ranks=())), LinkUp():
            # A spare waits for as long as there is a job that may need it.
            waiting = replace(state, deadline=inf)
            return Step(waiting, _hello(state), "ready to take over ranks of another node")
        case Waiting(Node(ranks=())), LinkDown():
            waiting = replace(state, deadline=now + config.permission_timeout_s)
            return Step(waiting, because="the manager is out of reach")
        case _, LinkUp():
            return Step(state, _hello(state), "the manager must know what is true here")
        case _, LinkDown():
            return Step(state, because="the manager will have to be told again what is true here")
        case Waiting(), Tick() if now >= state.deadline:
            return _over(
                state.node, 1, f"no permission to start in {config.permission_timeout_s:g} s"
            )
        case Waiting(), (m.StartWorkers(remaining) | m.RestartAgent(remaining)):
            return _first_start(replace(state.node, remaining=remaining), ())
        case Waiting(), m.RestartJob(incident, attempt, members):
            return _first_start(replace(state.node, incident=incident, attempt=attempt), members)
        case Waiting(), m.ReplaceWorkers(incident, members):
            return _first_start(replace(state.node, incident=incident), members)
        case Waiting(), Interrupted(because):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            return _over(state.node, 1, because, told=(Tell(ended),))
        case Waiting(), m.ExitAgent():
            return _over(state.node, 1, "the manager ordered the agent to exit")
        case Waiting(), m.EndJob(exit_code, because):
            return _over(state.node, exit_code, because)
        case Waiting(), _:
            return Step(state, because=f"{type(event).__name__} changes nothing before the start")
        case _, Started():
            return _started(state, event)
        case _, StartFailed(rank, incarnation, because):
            gone = m.WorkerExited(
                rank, incarnation, 0, None, None, f"it could not start: {because}"
            )
            return _exited(state, gone, now, config)
        case _, m.WorkerExited():
            return _exited(state, event, now, config)
        case Stopping(), (Interrupted() | Tick()):
            if isinstance(event, Tick) and now < state.deadline:
                return Step(state, because="the workers still have time")
            return _stop_now(
                state, "told twice" if isinstance(event, Interrupted) else "time is up"
            )
        case Stopping(), _:
            return Step(state, because=f"already stopping: {state.because}")
        case Training(), Interrupted(because, signum):
            ended = m.EndJob(1, f"node {state.node.node} was {because}")
            last_words = Tell(ended), Tell(m.RanksFailed(()))
            return _stop(state, 1, because, signum, now + config.grace_s, last_words)
        case Training(), m.ExitAgent():
            told = Tell(m.RanksFailed(()))
            return _stop(state, 1, "the manager ordered the agent to exit", None, now, (told,))
        case Training(), m.EndJob(exit_code, because):
            return _stop(state, exit_code, because, SIGTERM, now + config.grace_s)
        case Training(), Tick():
            return _waited(state, now, config)
        case Training(), m.StartWorkers():
            return Step(state, (_present(state.node, state.workers),), "the workers run already")
        case Training(), m.ReplaceWorkers():
            return _replace(state, event, now, config)
        case Training(), m.RestartJob():
            return _restart_job(state, event, now, config)
        case Training(), m.RestartAgent(remaining):
            return _restart_all(state, remaining, now, config)
        case Training(), m.RestartWorkers(ranks):
            again = {r: _next_life(state, r) for r in _local(state.node, ranks)}
            return _begin(state, again, False, now, config, f"ordered to restart {_names(again)}")
        case Training(), m.StopWorkers(ranks):
            here = _local(state.node, ranks)
            pending = {r: i for r, i in state.pending.items() if r not in here}
            workers, commands = _kill(state.workers, here)
            stopped = replace(state, workers=workers, pending=pending)
            return Step(stopped, commands, f"ordered to stop {_names(here)}")
        case _:
            assert_never(event)


# Waiting


def _waited(state: Training, now: float, config: WorkersConfig) -> Step:
    if now < state.deadline:
        return Step(state, because="the deadline has moved")
    if all(_finished(worker) for worker in state.workers.values()):
        return _over(state.node, 0, "every rank of the node has finished", state.workers)
    late = f"nobody decided about the dead ranks in {config.order_timeout_s:g} s"
    return _stop(state, 1, late, SIGTERM, now + config.grace_s)


# Starting


def _first_start(node: Node, members: tuple[m.Member, ...]) -> Step:
    if node.remaining < 0:
        return _over(node, 1, "the restart budget is used up")
    lives = {member.rank: member.incarnation for member in members}
    if lives:
        # Some of ours may stand elsewhere by now, and some of another node's here.
        node = replace(node, ranks=tuple(sorted(lives)))
    first = {rank: lives.get(rank, Incarnation(0)) for rank in node.ranks}
    workers = {rank: Starting(life) for rank, life in first.items()}
    commands = tuple(_start(node, rank, life) for rank, life in first.items())
    training = Training(node, workers, {}, False)
    return Step(training, commands, f"permitted to start {len(first)} ranks")


def _start(node: Node, rank: Rank, incarnation: Incarnation) -> StartWorker:
    return StartWorker(rank, incarnation, node.attempt, node.incident)


def _started(state: Training | Stopping, event: Started) -> Step:
    worker = state.workers.get(event.rank)
    if not isinstance(worker, Starting | Dying) or worker.incarnation != event.incarnation:
        return Step(
            state, (KillWorker(event.rank, event.incarnation),), "nobody asked for this life"
        )
    if isinstance(worker, Dying) or isinstance(state, Stopping):
        dying = _with(state, event.rank, Dying(event.incarnation, event.pid))
        killed = (KillWorker(event.rank, event.incarnation),)
        return Step(dying, killed, f"rank {event.rank} is not wanted any more")
    after = _with(state, event.rank, Running(event.incarnation, event.pid))
    assert isinstance(after, Training)
    if after.pending or any(isinstance(other, Starting) for other in after.workers.values()):
        return Step(after, because=f"rank {event.rank} runs")
    return Step(after, (_present(after.node, after.workers),), "every rank of the node runs")


# Endings


def _exited(
    state: Training | Stopping, exited: m.WorkerExited, now: float, config: WorkersConfig
) -> Step:
    worker = state.workers.get(exited.rank)
    if worker is None or isinstance(worker, Ended) or _life(worker) != exited.incarnation:
        return Step(state, because=f"an older life of rank {exited.rank} has ended")
    after = _with(state, exited.rank, Ended(exited))
    if isinstance(after, Stopping):
        if _alive(after.workers):
            return Step(after, because=f"{len(_alive(after.workers))} ranks still to end")
        return _over(after.node, after.exit_code, after.because, after.workers)
    if exited.rank in after.pending:
        return _go_on(after, (), f"the last life of rank {exited.rank} is over")
    deadline = after.deadline
    if all(_finished(w) for w in after.workers.values()):
        deadline = now + config.farewell_s
    elif exited.exit_code != 0 and not isinstance(worker, Dying):
        deadline = min(deadline, now + config.order_timeout_s)
    told: tuple[Command, ...] = (Tell(exited),)
    if config.in_ascends_words and exited.exit_code != 0:
        told += (Tell(m.RanksFailed((exited.rank,))),)
    because = f"rank {exited.rank} ended: {how(exited)}"
    return _go_on(replace(after, deadline=deadline), told, because)


def how(exited: m.WorkerExited) -> str:
    """How a process ended, in a few words."""
    if exited.signal is not None:
        return f"killed by signal {exited.signal}"
    return "no exit status" if exited.exit_code is None else f"exit code {exited.exit_code}"


def _go_on(state: Training, commands: tuple[Command, ...], because: str) -> Step:
    """Start what is pending and no longer blocked."""
    alive = _alive(state.workers)
    blocked = set(alive) if not state.together else (set(state.pending) if alive else set())
    free = {r: life for r, life in state.pending.items() if r not in blocked}
    if not free:
        return Step(state, commands, because)
    fresh = (RenewStore(state.node.attempt),) if state.together else ()
    started = tuple(_start(state.node, rank, life) for rank, life in sorted(free.items()))
    after = replace(
        state,
        workers={**state.workers, **{rank: Starting(life) for rank, life in free.items()}},
        pending={r: life for r, life in state.pending.items() if r in blocked},
        together=False,
    )
    return Step(after, (*commands, *fresh, *started), because)


def _stop(
    state: Training,
    exit_code: int,
    because: str,
    signum: int | None,
    deadline: float,
    told: tuple[Command, ...] = (),
) -> Step:
    alive = _alive(state.workers)
    if not alive:
        return _over(state.node, exit_code, because, state.workers, told)
    stopping = Stopping(state.node, state.workers, exit_code, because, deadline)
    if signum is None:
        return _stop_now(stopping, because, told)
    asked = tuple(AskToEnd(rank, _life(worker), signum) for rank, worker in alive.items())
    return Step(stopping, (*told, *asked), because)


def _stop_now(state: Stopping, why: str, told: tuple[Command, ...] = ()) -> Step:
    workers, commands = _kill(state.workers, state.workers)
    stopped = replace(state, workers=workers, deadline=inf)
    return Step(stopped, (*told, *commands), f"killing what is left: {why}")


def _over(
    node: Node,
    exit_code: int,
    because: str,
    workers: Workers | None = None,
    told: tuple[Command, ...] = (),
) -> Step:
    return Step(Over(node, exit_code, because, workers or {}), told, because)


# Orders


def _replace(state: Training, order: m.ReplaceWorkers, now: float, config: WorkersConfig) -> Step:
    if order.incident < state.node.incident:
        return Step(state, because=f"an order of incident {order.incident} comes too late")
    here = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted({*state.node.ranks, *here}))
    node = replace(state.node, incident=order.incident, ranks=ranks)
    new = {r: life for r, life in here.items() if life > _newest(state, r)}
    if not new:
        told = (_present(node, state.workers),)
        return Step(replace(state, node=node), told, "these lives have been started already")
    because = f"incident {order.incident}: {_names(new)} to be replaced"
    return _begin(replace(state, node=node), new, False, now, config, because)


def _restart_job(state: Training, order: m.RestartJob, now: float, config: WorkersConfig) -> Step:
    if order.attempt <= state.node.attempt:
        told = (_present(state.node, state.workers),)
        return Step(state, told, f"attempt {order.attempt} has been started already")
    lives = {w.rank: w.incarnation for w in order.workers if w.node == state.node.node}
    ranks = tuple(sorted(lives)) or state.node.ranks
    node = replace(state.node, incident=order.incident, attempt=order.attempt, ranks=ranks)
    again = {r: max(lives.get(r, Incarnation(0)), _next_life(state, r)) for r in node.ranks}
    return _begin(
        replace(state, node=node), again, True, now, config, f"attempt {order.attempt} begins"
    )


def _restart_all(state: Training, remaining: int, now: float, config: WorkersConfig) -> Step:
    node = replace(state.node, remaining=remaining, attempt=state.node.attempt + 1)
    if remaining < 0:
        return _stop(state, 1, "the restart budget is used up", None, now)
    again = {r: _next_life(state, r) for r in node.ranks}
    return _begin(
        replace(state, node=node), again, True, now, config, "ordered to restart all ranks"
    )


def _begin(
    state: Training,
    lives: Mapping[Rank, Incarnation],
    together: bool,
    now: float,
    config: WorkersConfig,
    because: str,
) -> Step:
    workers, commands = _kill(state.workers, lives)
    after = replace(
        state,
        workers=workers,
        pending={**state.pending, **lives},
        together=together or state.together,
        deadline=_patience(workers, {**state.pending, **lives}, now, config),
    )
    return _go_on(after, commands, because)


def _patience(
    workers: Workers, pending: Mapping[Rank, Incarnation], now: float, config: WorkersConfig
) -> float:
    """A dead rank that no order has named keeps the clock running."""
    forgotten = any(
        isinstance(worker, Ended) and not _finished(worker) and rank not in pending
        for rank, worker in workers.items()
    )
    return now + config.order_timeout_s if forgotten else inf


# Looking at workers


def _kill(workers: Workers, ranks: Iterable[Rank]) -> tuple[Workers, tuple[Command, ...]]:
    after, commands = dict(workers), []
    for rank in ranks:
        match workers.get(rank):
            case Running(incarnation, pid):
                after[rank] = Dying(incarnation, pid)
                commands.append(KillWorker(rank, incarnation))
            case Starting(incarnation):
                after[rank] = Dying(incarnation, None)
            case Dying() | Ended() | None:
                pass
    return after, tuple(commands)


def _with(state: Training | Stopping, rank: Rank, worker: Worker) -> Training | Stopping:
    return replace(state, workers={**state.workers, rank: worker})


def _life(worker: Worker) -> Incarnation:
    return worker.exited.incarnation if isinstance(worker, Ended) else worker.incarnation


def _newest(state: Training, rank: Rank) -> Incarnation:
    worker = state.workers.get(rank)
    known = Incarnation(-1) if worker is None else _life(worker)
    return max(known, state.pending.get(rank, known))


def _next_life(state: Training, rank: Rank) -> Incarnation:
    return Incarnation(_newest(state, rank) + 1)


def _alive(workers: Workers) -> Workers:
    return {rank: worker for rank, worker in workers.items() if not isinstance(worker, Ended)}


def _finished(worker: Worker) -> bool:
    return isinstance(worker, Ended) and worker.exited.exit_code == 0


def _local(node: Node, ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(rank for rank in ranks if rank in node.ranks)


def _names(ranks: Iterable[Rank]) -> str:
    return "rank " + ", ".join(map(str, ranks))


# What the manager is told


def _present(node: Node, workers: Workers) -> Tell:
    return Tell(m.WorkersStarted(node.node, running(workers)))


def running(workers: Workers) -> tuple[m.LocalWorker, ...]:
    """The processes that are there, in the order of their ranks."""
    return tuple(
        m.LocalWorker(rank, worker.incarnation, worker.pid)
        for rank, worker in sorted(workers.items())
        if isinstance(worker, Running)
    )


def _hello(state: State) -> tuple[Command, ...]:
    workers: Workers = {} if isinstance(state, Waiting) else state.workers
    node = state.node
    hello = SayHello(running(workers), node.attempt, node.remaining)
    if isinstance(state, Waiting):
        return Tell(m.AgentRegistered()), hello, Tell(m.RestartsLeft(node.remaining))
    ended = tuple(Tell(w.exited) for _, w in sorted(workers.items()) if isinstance(w, Ended))
    return Tell(m.AgentRegistered()), hello, *ended
