from __future__ import annotations

from collections.abc import Hashable
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.worker.clock_alignment import between, offsets

MS = 1_000_000
BEGIN = 1_700_000_000_000 * MS

Collectives = dict[int, dict[Hashable, tuple[int, int]]]


def job(random: Random, clocks: list[int], count: int = 30) -> Collectives:
    """Records of the same collectives by ranks whose clocks are ahead by these nanoseconds."""
    recorded: Collectives = {rank: {} for rank in range(len(clocks))}
    now = BEGIN
    for number in range(count):
        starts = [now + random.randrange(20 * MS) for _ in clocks]
        for rank, ahead in enumerate(clocks):
            end = max(starts) + random.randrange(1, 5 * MS)
            recorded[rank][number] = starts[rank] + ahead, end + ahead
        now = max(starts) + 10 * MS
    return recorded


@given(seed=st.integers(0, 10_000), ahead=st.integers(-3_600_000 * MS, 3_600_000 * MS))
def test_true_offset_is_within_the_claimed_bounds(seed: int, ahead: int) -> None:
    recorded = job(Random(seed), [0, ahead])
    found = between(recorded[0], recorded[1])
    assert found is not None
    assert abs(found.ns - ahead) <= found.within_ns
    if found.ns:
        assert found.within_ns < 10 * MS


def test_ranks_with_the_same_clock_are_not_shifted() -> None:
    found = offsets(job(Random(1), [0, 0, 0, 0]))
    assert [offset.ns for offset in found.values()] == [0, 0, 0, 0]


def test_ranks_without_a_shared_collective_are_aligned_through_others() -> None:
    recorded = job(Random(2), [0, 5_000 * MS, 9_000 * MS])
    chain = {
        0: {key: span for key, span in recorded[0].items() if int(str(key)) < 15},
        1: recorded[1],
        2: {key: span for key, span in recorded[2].items() if int(str(key)) >= 15},
    }
    found = offsets(chain)
    assert abs(found[2].ns - 9_000 * MS) <= found[2].within_ns < 20 * MS


def test_rank_without_any_shared_collective_is_not_shifted() -> None:
    found = offsets({0: {"a": (1, 2)}, 1: {"b": (1, 2)}, 2: {}})
    assert {rank: offset.within_ns for rank, offset in found.items()} == {0: 0, 1: -1, 2: -1}


def test_clock_that_was_set_during_the_job_does_not_fail() -> None:
    mine: dict[Hashable, tuple[int, int]] = {n: (n * 100, n * 100 + 10) for n in range(10)}
    yours = {
        k: (s + (500 if s > 500 else 0), e + (500 if s > 500 else 0)) for k, (s, e) in mine.items()
    }
    assert between(mine, yours) is not None
