"""Sets and tables of ranks behave like the plain ones, and never change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.rank_sets import NO_RANKS, RankSet, RankTable
from taskd.model.ids import Rank

some = st.sets(st.integers(0, 300).map(Rank))
entries = st.dictionaries(st.integers(0, 300).map(Rank), st.text(max_size=3))


@given(some, some)
def test_a_set_of_ranks_is_a_set(left: set[Rank], right: set[Rank]) -> None:
    a, b = RankSet(left), RankSet(right)

    assert a == left
    assert list(a) == sorted(left)
    assert len(a) == len(left)
    assert a & b == left & right
    assert a | right == left | right
    assert a - right == left - right
    assert (a <= b) == (left <= right)
    assert (a == b) == (left == right)
    assert hash(RankSet(left)) == hash(a)
    assert a == left, "nothing of this has changed it"


@given(some, st.integers(0, 300).map(Rank))
def test_those_since_a_rank(ranks: set[Rank], first: Rank) -> None:
    assert RankSet(ranks).from_rank(first) == {rank for rank in ranks if rank >= first}
    assert (first in RankSet(ranks)) == (first in ranks)


def test_what_is_no_rank_is_not_in_it() -> None:
    assert -1 not in RankSet([Rank(0)])
    assert not NO_RANKS
    assert repr(RankSet([Rank(2)])) == "RankSet([2])"


@given(entries, entries)
def test_a_table_is_a_mapping(before: dict[Rank, str], change: dict[Rank, str]) -> None:
    table = RankTable(before)
    after = table.update(change)

    assert table == before
    assert after == {**before, **change}
    assert len(after) == len({**before, **change})
    assert set(after) == {*before, *change}
    assert all(rank in after for rank in change)
    assert table.put(Rank(5), "x")[Rank(5)] == "x"
    assert table.get(Rank(999)) is None
