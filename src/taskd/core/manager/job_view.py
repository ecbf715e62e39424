"""What the manager knows of the job's nodes and ranks, and how each message changes it.

Everybody repeats what is true of them after every (re)connection, so this picture can be built
from nothing while training goes on. `learn` also says what is *news*: what the manager's machine
(`core/manager`) may have to react to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from taskd.core.rank_sets import NOBODY, RankSet, Table
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

FIRST_LIFE, NO_STEP = Incarnation(0), Step(0)


class Life(StrEnum):
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
    life: Life = Life.ABSENT
    incarnation: Incarnation = FIRST_LIFE
    pid: int = 0
    step: Step = NO_STEP
    phase: str = ""
    incident: Incident = NO_INCIDENT
    heard: bool = False
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
    ranks: RankSet = NOBODY
    """Those that have ever stood here; some may have moved since."""


@dataclass(frozen=True, slots=True)
class Picture:
    nodes: Mapping[NodeRank, NodeView]
    ranks: Table[RankView]

    def alive(self) -> RankSet:
        return RankSet(rank for rank, view in self.ranks.items() if view.life is Life.ALIVE)

    def on(self, node: NodeRank) -> tuple[RankView, ...]:
        """The ranks that stand on this node."""
        known = self.nodes.get(node)
        views = (self.ranks[rank] for rank in (known.ranks if known else NOBODY))
        return tuple(view for view in views if view.node == node)


# News


@dataclass(frozen=True, slots=True)
class RankDied:
    rank: Rank
    kind: str
    evidence: str


@dataclass(frozen=True, slots=True)
class RankCameUp:
    rank: Rank


@dataclass(frozen=True, slots=True)
class RankEnded:
    rank: Rank


@dataclass(frozen=True, slots=True)
class Ghost:
    """A former life of a rank speaks: it must end, or there would be two."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation


News = RankDied | RankCameUp | RankEnded | Ghost


@dataclass(frozen=True, slots=True)
class Learned:
    picture: Picture
    news: tuple[News, ...] = ()


def expect(nodes: int, ranks_per_node: int) -> Picture:
    """Before anybody has said anything: the ranks stand in order, as torchrun numbers them."""
    return Picture(
        {
            NodeRank(node): NodeView(
                NodeRank(node),
                ranks=RankSet(map(Rank, range(node * ranks_per_node, (node + 1) * ranks_per_node))),
            )
            for node in range(nodes)
        },
        Table(
            {
                Rank(rank): RankView(Rank(rank), NodeRank(rank // ranks_per_node))
                for rank in range(nodes * ranks_per_node)
            }
        ),
    )


def learn(picture: Picture, src: Position, body: Body) -> Learned:
    match body:
        case AgentHello(node=node, host=host, workers=workers, store=store, warm=warm):
            known = picture.nodes.get(node, NodeView(node))
            seen = replace(known, host=host, store=store, present=True, ours=True, warm=warm)
            return _local(_with_node(picture, seen), node, workers)
        case WorkersStarted(node=node, workers=workers):
            proven = replace(picture.nodes.get(node, NodeView(node)), warm=True)
            return _local(_with_node(picture, proven), node, workers)
        case WorkerHello():
            return _hello(picture, body)
        case WorkerExited():
            return _exited(picture, body)
        case RestartsLeft():
            return _restarted(picture, src)
        case RanksFailed(ranks=()):
            return node_lost(picture, NodeRank(int(src.server_rank)), "lost", "its agent has left")
        case RanksFailed(ranks=ranks):
            return _died(picture, ranks, "exited", f"reported by the agent of {src}")
        case Parked() | Repaired() | Committed():
            return _stepped(picture, body)
        case _:
            return Learned(picture)


def node_lost(picture: Picture, node: NodeRank, kind: str, evidence: str) -> Learned:
    """Nothing on this node can be counted on any more."""
    known = picture.nodes.get(node)
    if known is None:
        return Learned(picture)
    gone = _with_node(picture, replace(known, present=False))
    ranks = tuple(
        view.rank for view in picture.on(node) if view.life in (Life.ALIVE, Life.STARTING)
    )
    return _died(gone, ranks, kind, evidence)


def starting(picture: Picture, seats: Mapping[Rank, tuple[NodeRank, Incarnation]]) -> Picture:
    """These lives have been ordered."""
    ranks = {}
    for rank, (node, incarnation) in seats.items():
        ranks[rank] = replace(
            picture.ranks.get(rank, RankView(rank, node)),
            node=node,
            incarnation=incarnation,
            life=Life.STARTING,
            phase="",
            pid=0,
        )
    for rank, view in ranks.items():
        picture = _standing_on(picture, rank, view.node)
    return replace(picture, ranks=picture.ranks.update(ranks))


def started(picture: Picture, ranks: RankSet) -> Picture:
    """Nobody will tell, but these must be running by now."""
    views = {rank: replace(picture.ranks[rank], life=Life.ALIVE) for rank in ranks}
    return replace(picture, ranks=picture.ranks.update(views))


# One message each


def _local(picture: Picture, node: NodeRank, workers: tuple[LocalWorker, ...]) -> Learned:
    ranks, news = dict[Rank, RankView](), list[News]()
    for local in workers:
        view = picture.ranks.get(local.rank, RankView(local.rank, node))
        over = view.life in (Life.DEAD, Life.DONE) and local.incarnation == view.incarnation
        if local.incarnation < view.incarnation or over:
            continue
        if view.life is not Life.ALIVE or local.incarnation > view.incarnation:
            news.append(RankCameUp(local.rank))
        ranks[local.rank] = replace(
            view, node=node, life=Life.ALIVE, incarnation=local.incarnation, pid=local.pid
        )
    for rank in ranks:
        picture = _standing_on(picture, rank, node)
    return Learned(replace(picture, ranks=picture.ranks.update(ranks)), tuple(news))


def _joined(picture: Picture, src: Position) -> Picture:
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return picture
    node = NodeRank(int(src.server_rank))
    return _with_node(picture, replace(picture.nodes.get(node, NodeView(node)), present=True))


def _restarted(picture: Picture, src: Position) -> Learned:
    """An agent that asks to start has no processes: what it had before is over."""
    joined = _joined(picture, src)
    if src.role != Role.AGENT or not src.server_rank.isdigit():
        return Learned(picture)
    here = joined.on(NodeRank(int(src.server_rank)))
    gone = tuple(view.rank for view in here if view.life is Life.ALIVE)
    return _died(joined, gone, "lost", "its agent has been started anew")


def _hello(picture: Picture, hello: WorkerHello) -> Learned:
    known = picture.ranks.get(hello.rank, RankView(hello.rank, hello.node))
    over = known.life in (Life.DEAD, Life.DONE) and hello.incarnation == known.incarnation
    if hello.incarnation < known.incarnation or over:
        return Learned(picture, (Ghost(hello.rank, hello.node, hello.incarnation),))
    came_up = known.life is not Life.ALIVE or hello.incarnation > known.incarnation
    view = replace(
        known,
        node=hello.node,
        life=Life.ALIVE,
        incarnation=hello.incarnation,
        pid=hello.pid,
        step=hello.step,
        phase=hello.phase,
        incident=hello.incident,
        heard=True,
        protected=hello.protected,
        shard=hello.shard,
        replica=hello.replica,
    )
    news = (RankCameUp(hello.rank),) if came_up else ()
    return Learned(_with_rank(_standing_on(picture, hello.rank, hello.node), view), news)


def _exited(picture: Picture, told: WorkerExited) -> Learned:
    known = picture.ranks.get(told.rank)
    if known is None or told.incarnation < known.incarnation:
        return Learned(picture)
    if known.life in (Life.DEAD, Life.DONE) and told.incarnation == known.incarnation:
        return Learned(picture)
    known = replace(known, incarnation=told.incarnation)
    if told.exit_code == 0:
        ended = replace(known, life=Life.DONE, phase="done")
        return Learned(_with_rank(picture, ended), (RankEnded(told.rank),))
    how = f"signal {told.signal}" if told.signal else f"exit code {told.exit_code}"
    evidence = f"{how}: {told.evidence}" if told.evidence else how
    return _died(_with_rank(picture, known), (told.rank,), "exited", evidence)


def _died(picture: Picture, ranks: tuple[Rank, ...], kind: str, evidence: str) -> Learned:
    dead, news = dict[Rank, RankView](), list[News]()
    for rank in ranks:
        view = picture.ranks.get(rank)
        if view is not None and view.life is not Life.DEAD:
            dead[rank] = replace(view, life=Life.DEAD, phase="dead")
            news.append(RankDied(rank, kind, evidence))
    return Learned(replace(picture, ranks=picture.ranks.update(dead)), tuple(news))


def _stepped(picture: Picture, told: Parked | Repaired | Committed) -> Learned:
    view = picture.ranks.get(told.rank)
    if view is None or view.incarnation != told.incarnation:
        return Learned(picture)
    phase = {Parked: "parked", Repaired: "repairing", Committed: "training"}[type(told)]
    seen = replace(view, step=told.step, incident=told.incident, phase=phase)
    return Learned(_with_rank(picture, seen))


def _standing_on(picture: Picture, rank: Rank, node: NodeRank) -> Picture:
    known = picture.nodes.get(node, NodeView(node))
    if rank in known.ranks:
        return picture
    return _with_node(picture, replace(known, ranks=known.ranks | (rank,)))


def _with_node(picture: Picture, node: NodeView) -> Picture:
    return replace(picture, nodes={**picture.nodes, node.node: node})


def _with_rank(picture: Picture, rank: RankView) -> Picture:
    return replace(picture, ranks=picture.ranks.put(rank.rank, rank))
