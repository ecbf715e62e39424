"""Which ranks hold the same state, decided from fingerprints."""

from __future__ import annotations

from dataclasses import replace

from taskd.core.worker.state_classes import (
    Agreement,
    StatePrint,
    agree,
    describe,
    is_due,
    is_whole_due,
)
from taskd.model.ids import Rank


def agreement(*shards: str, **more: object) -> Agreement:
    return Agreement({Rank(r): name for r, name in enumerate(shards)}, **more)  # type: ignore[arg-type]


def prints(*each: StatePrint) -> dict[Rank, StatePrint]:
    return {Rank(rank): one for rank, one in enumerate(each)}


def test_equal_ranks_stay_one_class() -> None:
    before = agreement("", "", parts=("data",))
    same = StatePrint(state=7, buffers=3, parts=(1,))
    after = agree(before, 4, 5, prints(same, same))
    assert after == before
    assert after.is_uniform
    assert not after.has_own


def test_ranks_with_the_same_weights_form_a_class() -> None:
    before = agreement("", "", "", "")
    first, second = StatePrint(state=1), StatePrint(state=2)
    after = agree(before, 0, 0, prints(first, second, first, second))
    assert after.members() == {"rank-0@0": [0, 2], "rank-1@0": [1, 3]}
    assert after.has_replicas()
    assert not after.is_uniform
    assert after.survives_node_loss(size=4, per_node=2)
    assert not after.survives_node_loss(size=8, per_node=4)


def test_gradients_that_differ_divide_a_class_before_the_update() -> None:
    after = agree(
        agreement("", ""), 0, 1, prints(StatePrint(1, gradients=1), StatePrint(1, gradients=2))
    )
    assert len(after.members()) == 2


def test_new_names_differ_from_the_old_ones() -> None:
    once = agree(agreement("", "", ""), 0, 0, prints(*map(StatePrint, (1, 1, 2))))
    twice = agree(once, 4, 5, prints(*map(StatePrint, (1, 3, 2))))
    assert len(twice.members()) == 3
    assert once.shards[Rank(0)] not in twice.shards.values()
    assert twice.shards[Rank(2)] == once.shards[Rank(2)]
    assert twice.version == once.version + 1


def test_shards_of_distributed_tensors_keep_their_names() -> None:
    before = agreement("0of2", "1of2", "0of2", "1of2")
    after = agree(before, 0, 0, prints(*map(StatePrint, (1, 2, 1, 2))))
    assert after.shards == before.shards
    stages = agree(before, 0, 0, prints(*map(StatePrint, (1, 2, 3, 4))))
    assert len(stages.members()) == 4


def test_part_that_differs_within_a_class_belongs_to_its_rank() -> None:
    before = agreement("", "", parts=("data", "scheduler"))
    after = agree(before, 3, 4, prints(StatePrint(parts=(1, 5)), StatePrint(parts=(2, 5))))
    assert after.own_parts == {"data": 4}
    assert after.own_since == 4
    assert describe(after) == "data"


def test_part_that_differs_between_classes_does_not() -> None:
    before = agreement("a", "b", parts=("data",))
    after = agree(before, 3, 4, prints(StatePrint(parts=(1,)), StatePrint(parts=(2,))))
    assert not after.has_own


def test_difference_stays_when_the_ranks_become_equal_again() -> None:
    before = agreement("", "", parts=("data",))
    once = agree(before, 0, 1, prints(StatePrint(parts=(1,)), StatePrint(parts=(2,))))
    assert agree(once, 1, 2, prints(StatePrint(parts=(3,)), StatePrint(parts=(3,)))) == once


def test_buffers_and_left_gradients_belong_to_their_rank() -> None:
    before = agreement("", "")
    after = agree(before, 0, 1, prints(StatePrint(buffers=1), StatePrint(buffers=2)))
    assert after.buffers_since == 1
    left = StatePrint(has_left_gradients=True)
    assert agree(before, 5, 6, prints(left, left)).gradients_since == 6


def test_whole_state_is_compared_rarely_and_watched_parts_always() -> None:
    plain = agreement("", "", start=10)
    assert [step for step in range(10, 50) if is_whole_due(plain, step)] == [
        10, 11, 12, 14, 18, 26, 42,
    ]  # fmt: skip
    assert not is_due(plain, 13, has_left_gradients=False)
    assert is_due(plain, 13, has_left_gradients=True)
    watching = replace(plain, parts=("data",), watched=frozenset({"data"}))
    assert is_due(watching, 13, has_left_gradients=False)
    alone = replace(watching, shards={Rank(0): "a", Rank(1): "b"})
    assert not is_due(alone, 13, has_left_gradients=False)


def test_late_exchange_of_one_rank_is_known_to_all_and_stays() -> None:
    after = agree(agreement("", ""), 4, 5, prints(StatePrint(has_late_exchange=True), StatePrint()))
    assert after.has_late_exchange
    assert after.version == 1
    assert agree(after, 8, 9, prints(StatePrint(), StatePrint())) == after
