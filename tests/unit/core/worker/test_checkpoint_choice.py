"""Which ranks write which part of a continuous checkpoint."""

from __future__ import annotations

from taskd.core.worker import checkpoint_choice
from taskd.core.worker.checkpoint_choice import Parts
from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank


def agreement(*shards: str, **more: object) -> Agreement:
    return Agreement({Rank(r): name for r, name in enumerate(shards)}, **more)  # type: ignore[arg-type]


def shown(parts: Parts) -> tuple[list[int], list[int], bool]:
    return [*parts.writers], sorted(parts.shards), parts.own


def test_one_replica_writes_for_all() -> None:
    found = checkpoint_choice.parts(agreement("", "", ""), 8, (0, 1, 2))
    assert found is not None
    assert shown(found) == ([0], [0], False)


def test_next_replica_writes_while_the_first_is_missing() -> None:
    found = checkpoint_choice.parts(agreement("", "", ""), 8, (1, 2))
    assert found is not None
    assert shown(found) == ([1], [1], False)
    assert found.first == 1


def test_each_shard_is_written_once() -> None:
    found = checkpoint_choice.parts(agreement("a", "b", "a", "b"), 8, (0, 1, 2, 3))
    assert found is not None
    assert shown(found) == ([0, 1], [0, 1], False)


def test_own_state_is_written_by_each_rank() -> None:
    found = checkpoint_choice.parts(agreement("", "", own_parts={"loader": 0}), 8, (0, 1))
    assert found is not None
    assert shown(found) == ([0, 1], [0], True)


def test_no_checkpoint_is_incomplete() -> None:
    assert checkpoint_choice.parts(agreement("a", "b"), 8, (0,)) is None, "a shard has no holder"
    own = agreement("", "", own_parts={"loader": 0})
    assert checkpoint_choice.parts(own, 8, (0,)) is None, "state of rank 1 alone is missing"
    divided = agreement("rank-0@0", "rank-0@0", "rank-2@0")
    assert checkpoint_choice.parts(divided, 8, (0, 2)) is None


def test_state_that_a_start_has_loaded_is_not_written_again() -> None:
    due = [
        step for step in range(40, 61) if checkpoint_choice.is_due(agreement("", start=40), step, 5)
    ]
    assert due == [45, 50, 55, 60]
    assert not checkpoint_choice.is_due(agreement(""), 10, 0)
