"""The states of the agent's machine, and helpers for the workers in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from taskd.model import messages as m
from taskd.model import types
from taskd.model.agent import (
    Command,
    Dying,
    Ended,
    KillWorker,
    Running,
    SendHello,
    SendToManager,
    Starting,
    Worker,
)
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    permission_timeout_s: float = 900.0
    """How long the manager may take to permit the first start."""

    order_timeout_s: float = 600.0
    """How long the agent waits for an order after a rank has died before the node stops."""

    farewell_s: float = 600.0
    """How long a node whose ranks have all finished waits for the order that ends the job."""

    in_ascends_words: bool = False
    """Report deaths also with Ascend's message, for a manager that knows no other."""

    lost_manager_s: float = 120.0
    """How long a node waits for a manager whose machine is gone before it ends."""

    grace_s: float = 30.0
    """How long workers may take to end after SIGTERM before they are killed."""

    def __post_init__(self) -> None:
        for name in (
            "permission_timeout_s",
            "order_timeout_s",
            "farewell_s",
            "lost_manager_s",
            "grace_s",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


NO_INCIDENT = Incident(0)


Workers = Mapping[Rank, Worker]


# States


@dataclass(frozen=True, slots=True)
class Node:
    """The facts about the node that every state carries."""

    node: NodeRank
    ranks: tuple[Rank, ...]
    """Empty on a spare node, until it takes over the ranks of a lost one."""
    remaining: int
    """The restart budget."""
    attempt: int = 0
    incident: Incident = NO_INCIDENT
    condemned: str = ""
    """What a stress test has found here; repeated to a restarted manager."""
    shards: Mapping[Rank, m.RankShard] = field(default_factory=dict)
    """The shards of the job's ranks, kept for a restarted manager."""
    store: str = ""
    """host:port of the store for new processes; empty: the one of the first start."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Waiting for the manager's permission to start."""

    node: Node
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class LostManager:
    """The manager is gone, with ranks that ours wait for."""

    evidence: str
    order_by: float
    """The deadline that holds again when it is back."""


@dataclass(frozen=True, slots=True)
class Training:
    node: Node
    workers: Workers
    pending: Mapping[Rank, Incarnation]
    """Incarnations to start as soon as the processes that block them have exited."""
    together: bool
    """True: no pending rank starts before all old processes of the node have exited."""
    deadline: float = inf
    lost: LostManager | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    node: Node
    workers: Workers
    exit_code: int
    because: str
    deadline: float


@dataclass(frozen=True, slots=True)
class Done:
    node: Node
    exit_code: int
    because: str
    workers: Workers = field(default_factory=dict)
    deadline: float = inf


State = Waiting | Training | Stopping | Done

LEGAL: dict[type[State], set[type[State]]] = {
    Waiting: {Training, Done},
    Training: {Training, Stopping, Done},
    Stopping: {Stopping, Done},
    Done: set(),
}


Outcome = types.Outcome[State, Command]


# Workers


def kill(workers: Workers, ranks: Iterable[Rank]) -> tuple[Workers, tuple[Command, ...]]:
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


def with_worker(state: Training | Stopping, rank: Rank, worker: Worker) -> Training | Stopping:
    return replace(state, workers={**state.workers, rank: worker})


def incarnation_of(worker: Worker) -> Incarnation:
    return worker.exited.incarnation if isinstance(worker, Ended) else worker.incarnation


def newest(state: Training, rank: Rank) -> Incarnation:
    worker = state.workers.get(rank)
    known = Incarnation(-1) if worker is None else incarnation_of(worker)
    return max(known, state.pending.get(rank, known))


def next_incarnation(state: Training, rank: Rank) -> Incarnation:
    return Incarnation(newest(state, rank) + 1)


def alive(workers: Workers) -> Workers:
    return {rank: worker for rank, worker in workers.items() if not isinstance(worker, Ended)}


def finished(worker: Worker) -> bool:
    return isinstance(worker, Ended) and worker.exited.finished


def local(node: Node, ranks: Iterable[Rank]) -> tuple[Rank, ...]:
    return tuple(rank for rank in ranks if rank in node.ranks)


def names(ranks: Iterable[Rank]) -> str:
    return "rank " + ", ".join(map(str, ranks))


# Reports to the manager


def present(node: Node, workers: Workers) -> SendToManager:
    return SendToManager(m.WorkersStarted(node.node, running(workers)))


def running(workers: Workers) -> tuple[m.LocalWorker, ...]:
    """The running processes, in the order of their ranks."""
    return tuple(
        m.LocalWorker(rank, worker.incarnation, worker.pid)
        for rank, worker in sorted(workers.items())
        if isinstance(worker, Running)
    )


def describe(node: Node, workers: tuple[m.LocalWorker, ...]) -> SendHello:
    shards = tuple(shard for _, shard in sorted(node.shards.items()))
    return SendHello(workers, node.attempt, node.remaining, node.condemned, shards)


def hello(state: State) -> tuple[Command, ...]:
    workers: Workers = {} if isinstance(state, Waiting) else state.workers
    node = state.node
    hello = describe(node, running(workers))
    if isinstance(state, Waiting):
        return (
            SendToManager(m.AgentRegistered()),
            hello,
            SendToManager(m.RestartsLeft(node.remaining)),
        )
    ended = tuple(
        SendToManager(w.exited) for _, w in sorted(workers.items()) if isinstance(w, Ended)
    )
    # The exits first: a new manager that has heard all nodes plans with what it knows by then.
    return SendToManager(m.AgentRegistered()), *ended, hello
