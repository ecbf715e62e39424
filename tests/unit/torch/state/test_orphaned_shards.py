"""torch/state/orphaned_shards.py: which survivor reads the copy of a lost shard."""

from __future__ import annotations

from taskd.torch.state.orphaned_shards import Part, assign_readers


def test_only_a_rank_that_offers_a_part_reads_it() -> None:
    assert assign_readers([(1,), (2,)], [{(2,)}, {(1,)}]) == {(1,): 1, (2,): 0}


def test_parts_are_divided_between_the_ranks_that_offer_them() -> None:
    parts: list[Part] = [(1,), (2,), (3,), (4,)]
    readers = assign_readers(parts, [set(parts), set(parts)])
    assert sorted(readers.values()) == [0, 0, 1, 1]


def test_every_rank_computes_the_same_assignment() -> None:
    offers: list[set[Part]] = [{(1,), (2,)}, {(2,), (3,)}, {(1,), (3,)}]
    first = assign_readers([(1,), (2,), (3,)], offers)
    assert assign_readers([(3,), (1,), (2,)], offers) == first
