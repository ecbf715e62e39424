"""Where copies of the state stand, and where they should: never all copies of a shard on one node.

A node takes everything on it along when it is lost. The ranks (`torch/job.py`,
`torch/copies/buddy.py`) ask here whether replicas are enough and who should keep a second copy;
the manager (`manager/job_status.py`) asks which shards are at risk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from taskd.model.ids import NodeRank


def shards_on_one_node(copies: Iterable[tuple[str, NodeRank]]) -> dict[str, NodeRank]:
    """Shards of which every copy stands on the same node, given each copy's shard and node.

    Nothing is worse on one node than on another where there is only one.
    """
    standing: dict[str, set[NodeRank]] = {}
    for shard, node in copies:
        standing.setdefault(shard, set()).add(node)
    if len(set[NodeRank]().union(*standing.values())) < 2:
        return {}
    return {shard: min(nodes) for shard, nodes in standing.items() if len(nodes) == 1}


def survives_node_loss(holders: Collection[int], size: int, per_node: int) -> bool:
    """Whether one of these ranks is left whichever node is lost, as the job numbers its nodes."""
    if size <= per_node:
        return len(holders) > 1
    return len({rank // per_node for rank in holders}) > 1


def buddy_candidates(rank: int, members: Collection[int], per_node: int) -> list[int]:
    """Whom to ask for a second copy, the best first.

    Those at the same place on the following nodes, so that a node's copies go to many keepers; then
    everybody else in turn. Who stands on which node now is for the caller to find out.
    """
    turn = sorted(members, key=lambda other: (other <= rank, other))
    others = [other for other in turn if other != rank]
    return sorted(others, key=lambda other: other % per_node != rank % per_node)
