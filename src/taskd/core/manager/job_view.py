"""What the manager knows of the job's nodes and ranks, and how each message changes it.

Everybody repeats what is true of them after every (re)connection, so this job_view can be built
from nothing while training goes on. `learn` also says what is *news*: what the manager's machine
(`core/manager`) may have to react to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from taskd.core.rank_sets import NO_RANKS, RankSet, RankTable
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Position, Rank, Role, Step
from taskd.model.manager import NO_INCIDENT
from taskd.model.messages import (
    AgentHello,
    Body,
    Committed,
    LocalWorker,
    Parked,
    RanksFailed,
    Repaired,
    RestartsLeft,
    WorkerExited,
    WorkerHello,
    WorkersStarted,
)

FIRST_INCARNATION, NO_STEP = Incarnation(0), Step(0)


class ProcessState(StrEnum):
    ABSENT = "absent"
    """Not started yet, as far as we know."""
    STARTING = "starting"
    """Ordered, not yet seen."""
    ALIVE = "alive"
    DEAD = "dead"
    DONE = "done"
    """Has ended with exit code 0."""


@dataclass(frozen=True, slots=True)
class RankView:
    rank: Rank
    node: NodeRank
    process: ProcessState = ProcessState.ABSENT
    incarnation: Incarnation = FIRST_INCARNATION
    pid: int = 0
    step: Step = NO_STEP
    phase: str = ""
    incident: Incident = NO_INCIDENT
    said_hello: bool = False
    """It has said hello in some life, so what follows is known."""
    protected: bool = False
    shard: str = ""
    replica: int = -1


@dataclass(frozen=True, slots=True)
class NodeView:
    node: NodeRank
    host: str = ""
    store: str = ""
    present: bool = False
    """It has joined and has not been lost since."""
    ours: bool = False
    """It has said AgentHello. Ascend's agents never do."""
    warm: bool = True
    """Ranks that it is told to start will run at once."""
    ranks: RankSet = NO_RANKS
    """Those that have ever stood here; some may have moved since."""


@dataclass(frozen=True, slots=True)
class JobView:
    nodes: Mapping[NodeRank, NodeView]
    ranks: RankTable[RankView]

    def alive(self) -> RankSet:
        return RankSet(
            rank for rank, view in self.ranks.items() if view.process is ProcessState.ALIVE
        )

    def on(self, node: NodeRank) -> tuple[RankView, ...]:
        """The ranks that stand on this node."""
        known = self.nodes.get(node)
        views = (self.ranks[rank] for rank in (known.ranks if known else NO_RANKS))
        return tuple(view for view in views if view.node == node)


# News


@dataclass(frozen=True, slots=True)
class RankStarted:
    rank: Rank


@dataclass(frozen=True, slots=True)
class RankFinished:
    rank: Rank


@dataclass(frozen=True, slots=True)
class StaleIncarnation:
    """A former life of a rank speaks: it must end, or there would be two."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation


Change = Fault | RankStarted | RankFinished | StaleIncarnation


@dataclass(frozen=True, slots=True)
class ViewUpdate:
    view: JobView
    changes: tuple[Change, ...] = ()


def initial_view(nodes: int, ranks_per_node: int) -> JobView:
    """Before anybody has said anything: the ranks stand in order, as torchrun numbers them."""
    return JobView(
        {
            NodeRank(node): NodeView(
                NodeRank(node),
                ranks=RankSet(map(Rank, range(node * ranks_per_node, (node + 1) * ranks_per_node))),
            )
            for node in range(nodes)
        },
        RankTable(
            {
                Rank(rank): RankView(Rank(rank), NodeRank(rank // ranks_per_node))
                for rank in range(nodes * ranks_per_node)
            }
        ),
    )


def apply_message(job_view: JobView, src: Position, body: Body) -> ViewUpdate:
    match body:
        case AgentHello(node=node, host=host, workers=workers, store=store, warm=warm):
            known = job_view.nodes.get(node, NodeView(node))
            seen = replace(known, host=host, store=store, present=True, ours=True, warm=warm)
            return _local(_with_node(job_view, seen), node, workers)
        case WorkersStarted(node=node, workers=workers):
            proven = replace(job_view.nodes.get(node, NodeView(node)), warm=True)
            return _local(_with_node(job_view, proven), node, workers)
        case WorkerHello():
            return _hello(job_view, body)
        case WorkerExited():
            return _exited(job_view, body)
        case RestartsLeft():
            return _restarted(job_view, src)
        case RanksFailed(ranks=()):
            return node_lost(
                job_view, NodeRank(int(src.server_rank)), FaultCause.LOST, "its agent has left"
            )
        case RanksFailed(ranks=ranks):
            return _died(job_view, ranks, FaultCause.EXITED, f"reported by the agent of {src}")
        case Parked() | Repaired() | Committed():
            return _stepped(job_view, body)
        case _:
            return ViewUpdate(job_view)


def node_lost(job_view: JobView, node: NodeRank, cause: FaultCause, evidence: str) -> ViewUpdate:
    """Nothing on this node can be counted on any more."""
    known = job_view.nodes.get(node)
    if known is None:
        return ViewUpdate(job_view)
    gone = _with_node(job_view, replace(known, present=False))
    ranks = tuple(
        view.rank
        for view in job_view.on(node)
        if view.process in (ProcessState.ALIVE, ProcessState.STARTING)
    )
    return _died(gone, ranks, cause, evidence)


def mark_starting(job_view: JobView, seats: Mapping[Rank, tuple[NodeRank, Incarnation]]) -> JobView:
    """These lives have been ordered."""
    ranks = {}
    for rank, (node, incarnation) in seats.items():
        ranks[rank] = replace(
            job_view.ranks.get(rank, RankView(rank, node)),
            node=node,
            incarnation=incarnation,
            process=ProcessState.STARTING,
            phase="",
            pid=0,
        )
    for rank, view in ranks.items():
        job_view = _standing_on(job_view, rank, view.node)
    return replace(job_view, ranks=job_view.ranks.update(ranks))


def mark_alive(job_view: JobView, ranks: RankSet) -> JobView:
    """Nobody will tell, but these must be running by now."""
    views = {rank: replace(job_view.ranks[rank], process=ProcessState.ALIVE) for rank in ranks}
    return replace(job_view, ranks=job_view.ranks.update(views))


# One message each


def _local(job_view: JobView, node: NodeRank, workers: tuple[LocalWorker, ...]) -> ViewUpdate:
    ranks, news = dict[Rank, RankView](), list[Change]()
    for local in workers:
        view = job_view.ranks.get(local.rank, RankView(local.rank, node))
        over = (
            view.process in (ProcessState.DEAD, ProcessState.DONE)
            and local.incarnation == view.incarnation
        )
        if local.incarnation < view.incarnation or over:
            continue
        if view.process is not ProcessState.ALIVE or local.incarnation > view.incarnation:
            news.append(RankStarted(local.rank))
        ranks[local.rank] = replace(
            view,
            node=node,
            process=ProcessState.ALIVE,
            incarnation=local.incarnation,
            pid=local.pid,
        )
    for rank in ranks:
        job_view = _standing_on(job_view, rank, node)
    return ViewUpdate(replace(job_view, ranks=job_view.ranks.update(ranks)), tuple(news))


def _joined(job_view: JobView, src: Position) -> JobView:
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return job_view
    node = NodeRank(int(src.server_rank))
    return _with_node(job_view, replace(job_view.nodes.get(node, NodeView(node)), present=True))


def _restarted(job_view: JobView, src: Position) -> ViewUpdate:
    """An agent that asks to start has no processes: what it had before is over."""
    joined = _joined(job_view, src)
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return ViewUpdate(job_view)
    here = joined.on(NodeRank(int(src.server_rank)))
    gone = tuple(view.rank for view in here if view.process is ProcessState.ALIVE)
    return _died(joined, gone, FaultCause.LOST, "its agent has been started anew")


def _hello(job_view: JobView, hello: WorkerHello) -> ViewUpdate:
    known = job_view.ranks.get(hello.rank, RankView(hello.rank, hello.node))
    over = (
        known.process in (ProcessState.DEAD, ProcessState.DONE)
        and hello.incarnation == known.incarnation
    )
    if hello.incarnation < known.incarnation or over:
        return ViewUpdate(job_view, (StaleIncarnation(hello.rank, hello.node, hello.incarnation),))
    came_up = known.process is not ProcessState.ALIVE or hello.incarnation > known.incarnation
    view = replace(
        known,
        node=hello.node,
        process=ProcessState.ALIVE,
        incarnation=hello.incarnation,
        pid=hello.pid,
        step=hello.step,
        phase=hello.phase,
        incident=hello.incident,
        said_hello=True,
        protected=hello.protected,
        shard=hello.shard,
        replica=hello.replica,
    )
    news = (RankStarted(hello.rank),) if came_up else ()
    return ViewUpdate(_with_rank(_standing_on(job_view, hello.rank, hello.node), view), news)


def _exited(job_view: JobView, told: WorkerExited) -> ViewUpdate:
    known = job_view.ranks.get(told.rank)
    if known is None or told.incarnation < known.incarnation:
        return ViewUpdate(job_view)
    if (
        known.process in (ProcessState.DEAD, ProcessState.DONE)
        and told.incarnation == known.incarnation
    ):
        return ViewUpdate(job_view)
    known = replace(known, incarnation=told.incarnation)
    if told.exit_code == 0:
        ended = replace(known, process=ProcessState.DONE, phase="done")
        return ViewUpdate(_with_rank(job_view, ended), (RankFinished(told.rank),))
    how = f"signal {told.signal}" if told.signal else f"exit code {told.exit_code}"
    evidence = f"{how}: {told.evidence}" if told.evidence else how
    return _died(_with_rank(job_view, known), (told.rank,), FaultCause.EXITED, evidence)


def _died(
    job_view: JobView, ranks: tuple[Rank, ...], cause: FaultCause, evidence: str
) -> ViewUpdate:
    dead, news = dict[Rank, RankView](), list[Change]()
    for rank in ranks:
        view = job_view.ranks.get(rank)
        if view is not None and view.process is not ProcessState.DEAD:
            dead[rank] = replace(view, process=ProcessState.DEAD, phase="dead")
            news.append(Fault.of(rank, cause, evidence))
    return ViewUpdate(replace(job_view, ranks=job_view.ranks.update(dead)), tuple(news))


def _stepped(job_view: JobView, told: Parked | Repaired | Committed) -> ViewUpdate:
    view = job_view.ranks.get(told.rank)
    if view is None or view.incarnation != told.incarnation:
        return ViewUpdate(job_view)
    phase = {Parked: "parked", Repaired: "repairing", Committed: "training"}[type(told)]
    seen = replace(view, step=told.step, incident=told.incident, phase=phase)
    return ViewUpdate(_with_rank(job_view, seen))


def _standing_on(job_view: JobView, rank: Rank, node: NodeRank) -> JobView:
    known = job_view.nodes.get(node, NodeView(node))
    if rank in known.ranks:
        return job_view
    return _with_node(job_view, replace(known, ranks=known.ranks | (rank,)))


def _with_node(job_view: JobView, node: NodeView) -> JobView:
    return replace(job_view, nodes={**job_view.nodes, node.node: node})


def _with_rank(job_view: JobView, rank: RankView) -> JobView:
    return replace(job_view, ranks=job_view.ranks.put(rank.rank, rank))
