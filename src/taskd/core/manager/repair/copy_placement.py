"""On which nodes copies of the state should be: never all copies of a shard on one node.

When a node is lost, everything on it is lost. The ranks (`core/worker/state_classes.py`,
`torch/copies/buddy.py`) use this to decide whether replicas are enough and which rank holds a
second copy; the manager (`job_status.py`) to find the shards at risk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from taskd.model.ids import NodeRank


def shards_on_one_node(copies: Iterable[tuple[str, NodeRank]]) -> dict[str, NodeRank]:
    """Shards of which all copies are on one node, given the shard and node of each copy.

    Empty for a job with a single node: there it cannot be avoided.
    """
    nodes_of: dict[str, set[NodeRank]] = {}
    for shard, node in copies:
        nodes_of.setdefault(shard, set()).add(node)
    if len(set[NodeRank]().union(*nodes_of.values())) < 2:
        return {}
    return {shard: min(nodes) for shard, nodes in nodes_of.items() if len(nodes) == 1}


def survives_node_loss(holders: Collection[int], size: int, per_node: int) -> bool:
    """Whether at least one of these ranks survives the loss of any single node."""
    if size <= per_node:
        return len(holders) > 1
    return len({rank // per_node for rank in holders}) > 1


def buddy_candidates(rank: int, members: Collection[int], per_node: int) -> list[int]:
    """The ranks that could hold a second copy, the best first.

    First the ranks with the same local rank on the following nodes, so that the copies of a node
    spread over many buddies; then all others in order. Assumes the initial placement of ranks on
    nodes: the caller must check where they are now.
    """
    in_order = sorted(members, key=lambda other: (other <= rank, other))
    others = [other for other in in_order if other != rank]
    return sorted(others, key=lambda other: other % per_node != rank % per_node)
