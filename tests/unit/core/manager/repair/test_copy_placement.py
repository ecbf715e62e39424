"""No shard may be lost with a single node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.manager.repair.copy_placement import (
    buddy_candidates,
    shards_on_one_node,
    survives_node_loss,
)
from taskd.model.ids import NodeRank

A, B = NodeRank(0), NodeRank(1)


def test_shard_with_both_copies_on_one_node_is_at_risk() -> None:
    assert shards_on_one_node([("a", A), ("a", A), ("b", B), ("b", B)]) == {"a": A, "b": B}
    assert shards_on_one_node([("a", A), ("a", B), ("b", B), ("b", A)]) == {}
    assert shards_on_one_node([("a", A), ("a", B), ("b", B)]) == {"b": B}


def test_single_node_job_has_no_shards_at_risk() -> None:
    assert shards_on_one_node([("a", A), ("b", A)]) == {}
    assert shards_on_one_node([]) == {}
    assert survives_node_loss((0, 1), size=4, per_node=4)
    assert not survives_node_loss((1,), size=4, per_node=4)


def test_only_replicas_on_different_nodes_count() -> None:
    assert survives_node_loss((0, 2), size=4, per_node=2)
    assert not survives_node_loss((0, 1), size=4, per_node=2)


def test_copies_of_a_node_spread_over_many_buddies() -> None:
    first = [buddy_candidates(rank, range(8), 4)[0] for rank in range(8)]
    assert first == [4, 5, 6, 7, 0, 1, 2, 3]
    assert buddy_candidates(1, range(6), 2) == [3, 5, 2, 4, 0]


def test_missing_rank_is_not_a_buddy_candidate() -> None:
    assert buddy_candidates(1, (0, 1, 2, 5), 2) == [5, 2, 0]


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 8), st.integers(0, 63))
def test_every_other_rank_is_a_candidate_once(members: set[int], per_node: int, rank: int) -> None:
    asked = buddy_candidates(rank, members, per_node)
    assert sorted(asked) == sorted(members - {rank})
