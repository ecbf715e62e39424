"""Which agents keep the shards of all ranks, so that a restarted manager knows those of lost ranks.

A manager that starts again asks the ranks which shard they hold. A rank that died meanwhile cannot
answer, and without its shard nothing shows that another rank holds the same state, or a copy of it.
So the manager gives each sharded rank's shard to a few agents, which repeat it in their hello. A
few are enough: all of them and the manager would have to be lost together.
"""

from __future__ import annotations

from heapq import nsmallest

from taskd.core.manager.job_view import JobView, RankView
from taskd.model.ids import NodeRank, agent
from taskd.model.manager import Command, SendMessage
from taskd.model.messages import AgentHello, Body, KeepShards, RankShard, WorkerHello

KEEPERS = 4


def after_message(before: JobView, after: JobView, body: Body) -> tuple[Command, ...]:
    """What the keepers must be sent, because of this message."""
    match body:
        case WorkerHello(rank=rank) if (known := after.ranks.get(rank)) is not None:
            shard = _shard(known)
            old = before.ranks.get(rank)
            if not _is_sharded(known) or (old is not None and _shard(old) == shard):
                return ()
            return _send(_keepers(after), (shard,))
        case AgentHello(node=node, shards=kept) if node in _keepers(after):
            known_shards = _shards(after)
            return _send((node,), known_shards) if set(known_shards) - set(kept) else ()
        case _:
            return ()


def after_loss(before: JobView, after: JobView) -> tuple[Command, ...]:
    """A node is lost: if it was a keeper, the next one takes its place."""
    new = [node for node in _keepers(after) if node not in _keepers(before)]
    return _send(tuple(new), _shards(after)) if new else ()


def _keepers(view: JobView) -> tuple[NodeRank, ...]:
    present = (node for node, known in view.nodes.items() if known.present and known.ours)
    return tuple(nsmallest(KEEPERS, present))


def _send(nodes: tuple[NodeRank, ...], shards: tuple[RankShard, ...]) -> tuple[Command, ...]:
    return tuple(SendMessage(agent(node), KeepShards(shards)) for node in nodes if shards)


def _shards(view: JobView) -> tuple[RankShard, ...]:
    return tuple(_shard(rank) for _, rank in sorted(view.ranks.items()) if _is_sharded(rank))


def _shard(view: RankView) -> RankShard:
    return RankShard(view.rank, view.shard, view.replica)


def _is_sharded(view: RankView) -> bool:
    """Under DDP every rank holds everything, and there is nothing to know."""
    return bool(view.shard) or view.replica >= 0
