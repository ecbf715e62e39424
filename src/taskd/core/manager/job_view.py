"""What the manager knows about the job's nodes and ranks, and how each message changes it.

Agents and workers repeat their state after every (re)connection, so that a restarted manager can
rebuild this view while training continues. `apply_message` also returns the changes that the
manager's machine may have to react to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from taskd.core.rank_sets import NO_RANKS, RankSet, RankTable
from taskd.model.faults import Fault, FaultCause, signal_text
from taskd.model.ids import Incarnation, Incident, NodeRank, Position, Rank, Role, Step
from taskd.model.manager import NO_INCIDENT
from taskd.model.messages import (
    AgentHello,
    Body,
    Committed,
    LocalWorker,
    Parked,
    RanksFailed,
    RankShard,
    Repaired,
    RestartsLeft,
    ScriptError,
    WorkerExited,
    WorkerHello,
    WorkersStarted,
)

FIRST_INCARNATION, NO_STEP = Incarnation(0), Step(0)


class ProcessState(StrEnum):
    ABSENT = "absent"
    """Not started yet, as far as is known."""
    STARTING = "starting"
    """Its start has been ordered, but not confirmed."""
    ALIVE = "alive"
    DEAD = "dead"
    DONE = "done"
    """Exited with code 0."""


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
    """Some incarnation has sent WorkerHello, so that the fields below are known."""
    protected: bool = False
    shard: str = ""
    replica: int = -1
    own_since: int = -1
    error: ScriptError | None = None
    """The exception that has ended the script of its last process that has exited."""
    error_of: Incarnation = FIRST_INCARNATION
    """Which process this was."""


@dataclass(frozen=True, slots=True)
class NodeView:
    node: NodeRank
    host: str = ""
    store: str = ""
    present: bool = False
    """It has joined and has not been lost since."""
    ours: bool = False
    """It has sent AgentHello. Ascend's agents never do."""
    warm: bool = True
    """New ranks can run there at once."""
    ranks: RankSet = NO_RANKS
    """All ranks that were ever located here; some may have moved since."""


@dataclass(frozen=True, slots=True)
class JobView:
    nodes: Mapping[NodeRank, NodeView]
    ranks: RankTable[RankView]

    def alive(self) -> RankSet:
        return RankSet(
            rank for rank, view in self.ranks.items() if view.process is ProcessState.ALIVE
        )

    def stores(self) -> set[str]:
        """Those that answer: a node that has just joined serves its store when it is warm."""
        serving = (view for view in self.nodes.values() if view.present and view.warm)
        return {view.store for view in serving if view.store}

    def store(self) -> str:
        """host:port of a node's store; empty: no node serves one.

        It is that of the first node that is ready: a launcher accepts connections for its store
        before the store itself runs.
        """
        serving = (view for view in self.nodes.values() if view.present and view.store)
        first = min(serving, key=lambda view: (not view.warm, view.node), default=None)
        return first.store if first else ""

    def on(self, node: NodeRank) -> tuple[RankView, ...]:
        """The ranks that are located on this node."""
        known = self.nodes.get(node)
        views = (self.ranks[rank] for rank in (known.ranks if known else NO_RANKS))
        return tuple(view for view in views if view.node == node)


# Changes


@dataclass(frozen=True, slots=True)
class RankStarted:
    rank: Rank


@dataclass(frozen=True, slots=True)
class RankFinished:
    rank: Rank


@dataclass(frozen=True, slots=True)
class StaleIncarnation:
    """A message came from, or names, a former incarnation of a rank, or one that counts as lost:
    that process must exit."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation


Change = Fault | RankStarted | RankFinished | StaleIncarnation


@dataclass(frozen=True, slots=True)
class ViewUpdate:
    view: JobView
    changes: tuple[Change, ...] = ()


def initial_view(nodes: int, ranks_per_node: int) -> JobView:
    """The view before the first message: ranks in node order, as torchrun numbers them."""
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
            job_view = _remember_shards(job_view, body.shards)
            known = job_view.nodes.get(node, NodeView(node))
            joined = replace(known, host=host, store=store, present=True, ours=True, warm=warm)
            return _local(_with_node(job_view, joined), node, workers)
        case WorkersStarted(node=node, workers=workers):
            proven = replace(job_view.nodes.get(node, NodeView(node)), warm=True)
            return _local(_with_node(job_view, proven), node, workers)
        case WorkerHello():
            return _hello(job_view, body)
        case WorkerExited():
            return _exited(job_view, src, body)
        case RestartsLeft():
            return _restarted(job_view, src)
        case RanksFailed(ranks=()):
            return node_lost(
                job_view, NodeRank(int(src.server_rank)), FaultCause.LOST, "its agent has left"
            )
        case RanksFailed(ranks=ranks):
            here = _global_ranks(job_view, NodeRank(int(src.server_rank)), ranks)
            return _died(job_view, here, FaultCause.EXITED, f"reported by the agent of {src}")
        case Parked() | Repaired() | Committed():
            return _progressed(job_view, body)
        case _:
            return ViewUpdate(job_view)


def node_lost(job_view: JobView, node: NodeRank, cause: FaultCause, evidence: str) -> ViewUpdate:
    """The node and all processes on it count as lost."""
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


def mark_starting(
    job_view: JobView, placements: Mapping[Rank, tuple[NodeRank, Incarnation]]
) -> JobView:
    """The start of these incarnations has been ordered."""
    ranks = {}
    for rank, (node, incarnation) in placements.items():
        ranks[rank] = replace(
            job_view.ranks.get(rank, RankView(rank, node)),
            node=node,
            incarnation=incarnation,
            process=ProcessState.STARTING,
            phase="",
            pid=0,
        )
    for rank, view in ranks.items():
        job_view = _located_on(job_view, rank, view.node)
    return replace(job_view, ranks=job_view.ranks.update(ranks))


def mark_alive(job_view: JobView, ranks: RankSet) -> JobView:
    """These ranks count as running without a confirmation: Ascend's agents send none."""
    views = {rank: replace(job_view.ranks[rank], process=ProcessState.ALIVE) for rank in ranks}
    return replace(job_view, ranks=job_view.ranks.update(views))


# One function per message


def _local(job_view: JobView, node: NodeRank, workers: tuple[LocalWorker, ...]) -> ViewUpdate:
    ranks, changes = dict[Rank, RankView](), list[Change]()
    for local in workers:
        view = job_view.ranks.get(local.rank, RankView(local.rank, node))
        has_ended = (
            view.process in (ProcessState.DEAD, ProcessState.DONE)
            and local.incarnation == view.incarnation
        )
        if local.incarnation < view.incarnation or has_ended:
            if view.process is not ProcessState.DONE:
                changes.append(StaleIncarnation(local.rank, node, local.incarnation))
            continue
        changes += _left_behind(view, node, local.incarnation)
        if view.process is not ProcessState.ALIVE or local.incarnation > view.incarnation:
            changes.append(RankStarted(local.rank))
        ranks[local.rank] = replace(
            view,
            node=node,
            process=ProcessState.ALIVE,
            incarnation=local.incarnation,
            pid=local.pid,
        )
    for rank in ranks:
        job_view = _located_on(job_view, rank, node)
    return ViewUpdate(replace(job_view, ranks=job_view.ranks.update(ranks)), tuple(changes))


def _remember_shards(job_view: JobView, shards: tuple[RankShard, ...]) -> JobView:
    """An agent repeats what a former manager has heard; what the ranks say themselves is newer."""
    ranks = {
        kept.rank: replace(known, shard=kept.shard, replica=kept.replica)
        for kept in shards
        if (known := job_view.ranks.get(kept.rank)) is not None and not known.said_hello
    }
    return replace(job_view, ranks=job_view.ranks.update(ranks)) if ranks else job_view


def _joined(job_view: JobView, src: Position) -> JobView:
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return job_view
    node = NodeRank(int(src.server_rank))
    return _with_node(job_view, replace(job_view.nodes.get(node, NodeView(node)), present=True))


def _restarted(job_view: JobView, src: Position) -> ViewUpdate:
    """An agent that requests a start has no processes: the ones it had before have ended."""
    joined = _joined(job_view, src)
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return ViewUpdate(job_view)
    here = joined.on(NodeRank(int(src.server_rank)))
    gone = tuple(view.rank for view in here if view.process is ProcessState.ALIVE)
    return _died(joined, gone, FaultCause.LOST, "its agent has been restarted")


def _global_ranks(
    job_view: JobView, node: NodeRank, reported: tuple[Rank, ...]
) -> tuple[Rank, ...]:
    """An agent reports its own ranks only. Ascend's agents of MindSpore count them from 0."""
    if (known := job_view.nodes.get(node)) is not None and known.ours:
        return reported
    here = sorted(view.rank for view in job_view.on(node))
    return tuple(
        rank if rank in here else here[rank]
        for rank in reported
        if rank in here or rank < len(here)
    )


def _hello(job_view: JobView, hello: WorkerHello) -> ViewUpdate:
    known = job_view.ranks.get(hello.rank, RankView(hello.rank, hello.node))
    has_ended = (
        known.process in (ProcessState.DEAD, ProcessState.DONE)
        and hello.incarnation == known.incarnation
    )
    if hello.incarnation < known.incarnation or has_ended:
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
    )
    if hello.phase != "joining" or not (known.said_hello or known.shard):
        # A new process does not know what its predecessor held before it has received it.
        view = replace(view, shard=hello.shard, replica=hello.replica, own_since=hello.own_since)
    stale = _left_behind(known, hello.node, hello.incarnation)
    changes = (*stale, *((RankStarted(hello.rank),) if came_up else ()))
    return ViewUpdate(_with_rank(_located_on(job_view, hello.rank, hello.node), view), changes)


def _left_behind(
    known: RankView, node: NodeRank, newer: Incarnation
) -> tuple[StaleIncarnation, ...]:
    """A former leader has moved the rank to this node, and its process on the other one lives."""
    if known.process is not ProcessState.ALIVE or node == known.node or newer <= known.incarnation:
        return ()
    return (StaleIncarnation(known.rank, known.node, known.incarnation),)


def _exited(job_view: JobView, src: Position, message: WorkerExited) -> ViewUpdate:
    known = job_view.ranks.get(message.rank)
    if known is None:
        return ViewUpdate(job_view)
    if message.incarnation < known.incarnation:
        # It was replaced before its end was known.
        if message.error is None or message.incarnation <= known.error_of:
            return ViewUpdate(job_view)
        late = replace(known, error=message.error, error_of=message.incarnation)
        return ViewUpdate(_with_rank(job_view, late))
    if (
        known.process in (ProcessState.DEAD, ProcessState.DONE)
        and message.incarnation == known.incarnation
    ):
        return ViewUpdate(job_view)
    # A manager that started later may never have heard of this process, nor where it ran.
    node = NodeRank(int(src.server_rank)) if src.server_rank.isdigit() else known.node
    job_view = _located_on(job_view, message.rank, node)
    step = max(known.step, message.step)
    known = replace(known, incarnation=message.incarnation, node=node, step=step)
    if message.finished:
        ended = replace(known, process=ProcessState.DONE, phase="done")
        return ViewUpdate(_with_rank(job_view, ended), (RankFinished(message.rank),))
    how = signal_text(message.signal) if message.signal else f"exit code {message.exit_code}"
    evidence = f"{how}: {message.evidence}" if message.evidence else how
    known = replace(known, error=message.error, error_of=message.incarnation)
    return _died(_with_rank(job_view, known), (message.rank,), FaultCause.EXITED, evidence)


def _died(
    job_view: JobView, ranks: tuple[Rank, ...], cause: FaultCause, evidence: str
) -> ViewUpdate:
    dead, changes = dict[Rank, RankView](), list[Change]()
    for rank in ranks:
        view = job_view.ranks.get(rank)
        if view is not None and view.process is not ProcessState.DEAD:
            dead[rank] = replace(view, process=ProcessState.DEAD, phase="dead")
            changes.append(Fault.of(rank, cause, evidence))
    return ViewUpdate(replace(job_view, ranks=job_view.ranks.update(dead)), tuple(changes))


def _progressed(job_view: JobView, message: Parked | Repaired | Committed) -> ViewUpdate:
    view = job_view.ranks.get(message.rank)
    if view is None or view.incarnation != message.incarnation:
        return ViewUpdate(job_view)
    phase = {Parked: "parked", Repaired: "repairing", Committed: "training"}[type(message)]
    seen = replace(view, step=message.step, incident=message.incident, phase=phase)
    return ViewUpdate(_with_rank(job_view, seen))


def _located_on(job_view: JobView, rank: Rank, node: NodeRank) -> JobView:
    known = job_view.nodes.get(node, NodeView(node))
    if rank in known.ranks:
        return job_view
    return _with_node(job_view, replace(known, ranks=known.ranks | (rank,)))


def _with_node(job_view: JobView, node: NodeView) -> JobView:
    return replace(job_view, nodes={**job_view.nodes, node.node: node})


def _with_rank(job_view: JobView, rank: RankView) -> JobView:
    return replace(job_view, ranks=job_view.ranks.put(rank.rank, rank))
