"""The verdict of a stress test names the right rank, and only that one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from taskd.core.worker import stress_verdict as stress
from taskd.core.worker.stress_verdict import ComputeResult, TransferResult
from taskd.model.ids import Rank
from taskd.model.operations import FAULTY, PASSED

FACTOR = 4.0


def ranks(count: int) -> list[Rank]:
    return [Rank(rank) for rank in range(count)]


def world(count: int, seed: int, slow: set[tuple[int, int]] = frozenset()) -> list[TransferResult]:  # type: ignore[assignment]
    """All links between this many ranks, with the noise of a busy machine."""
    random = Random(seed)
    seen = []
    for a, b in combinations(ranks(count), 2):
        speed = 1000 * random.uniform(0.6, 1.4) / (20 if (a, b) in slow else 1)
        for one, other in ((a, b), (b, a)):
            seen.append(TransferResult(one, other, 0, speed * random.uniform(0.9, 1.1)))
    return seen


@pytest.mark.parametrize("count", range(1, 12))
def test_every_pair_is_tested_once_and_no_rank_twice_per_round(count: int) -> None:
    met = []
    for partners in stress.pair_rounds(ranks(count)):
        assert all(partners[other] == one for one, other in partners.items())
        met += [(a, b) for a, b in partners.items() if a < b]
    assert sorted(met) == list(combinations(range(count), 2))


def test_wrong_product_fails_only_its_own_rank() -> None:
    work = [ComputeResult(rank, 100, int(rank == 2), 50.0) for rank in ranks(4)]
    codes = [stress.judge_work(rank, work, FACTOR).code for rank in ranks(4)]
    assert codes == [PASSED, PASSED, FAULTY, PASSED]
    assert "1 of 100 products were wrong" in stress.judge_work(Rank(2), work, FACTOR).text


def test_rank_far_below_the_median_is_slow_but_small_differences_pass() -> None:
    even = [ComputeResult(rank, 100, 0, 40.0 + 15 * rank) for rank in ranks(4)]
    assert {stress.judge_work(rank, even, FACTOR).code for rank in ranks(4)} == {PASSED}
    odd = [ComputeResult(rank, 100, 0, 5.0 if rank == 1 else 50.0) for rank in ranks(4)]
    codes = [stress.judge_work(rank, odd, FACTOR).code for rank in ranks(4)]
    assert codes == [PASSED, FAULTY, PASSED, PASSED]


def test_two_ranks_are_too_few_to_judge_speed() -> None:
    work = [ComputeResult(Rank(0), 9, 0, 1.0), ComputeResult(Rank(1), 9, 0, 100.0)]
    assert stress.judge_work(Rank(0), work, FACTOR).code == PASSED


@pytest.mark.parametrize("seed", range(50))
def test_equal_links_pass(seed: int) -> None:
    seen = world(6, seed)
    assert {stress.judge_links(rank, seen, FACTOR).code for rank in ranks(6)} == {PASSED}


@pytest.mark.parametrize("seed", range(50))
def test_only_the_rank_with_all_slow_links_is_named(seed: int) -> None:
    bad = Rank(seed % 5)
    slow = {(min(bad, other), max(bad, other)) for other in range(5) if other != bad}
    seen = world(5, seed, slow)
    found = {rank for rank in ranks(5) if stress.judge_links(rank, seen, FACTOR).code == FAULTY}
    assert found == {bad}


@pytest.mark.parametrize("seed", range(50))
def test_one_slow_link_is_blamed_on_one_of_its_ends(seed: int) -> None:
    seen = world(4, seed, {(0, 3)})
    verdicts = {rank: stress.judge_links(rank, seen, FACTOR) for rank in ranks(4)}
    guilty = [rank for rank, verdict in verdicts.items() if verdict.code == FAULTY]
    assert len(guilty) == 1
    assert guilty[0] in (0, 3)
    assert "link 0-3" in verdicts[guilty[0]].text
    (other,) = {0, 3} - set(guilty)
    assert "is faulty" in verdicts[Rank(other)].text


@pytest.mark.parametrize("seed", range(20))
def test_one_slow_direction_between_two_nodes_is_found(seed: int) -> None:
    """Ranks 0 and 1 on one node, 2 and 3 on the other: four of six links cross the cable."""
    seen = [
        replace(one, mb_s=one.mb_s / 50) if one.rank < 2 <= one.peer else one
        for one in world(4, seed)
    ]
    verdicts = {rank: stress.judge_links(rank, seen, FACTOR) for rank in ranks(4)}
    guilty = {rank for rank, verdict in verdicts.items() if verdict.code == FAULTY}
    assert guilty in ({0, 1}, {2, 3})
    assert "MB/s to rank" in verdicts[Rank(min(guilty))].text


def test_damaged_message_makes_a_bad_link_at_any_speed() -> None:
    seen = [TransferResult(Rank(0), Rank(1), 1, 900.0), TransferResult(Rank(1), Rank(0), 0, 900.0)]
    codes = {rank: stress.judge_links(rank, seen, FACTOR).code for rank in ranks(2)}
    assert sorted(codes.values()) == [PASSED, FAULTY]


def test_rank_without_peers_passes() -> None:
    assert stress.judge_links(Rank(0), [], FACTOR).code == PASSED


def test_link_tested_twice_counts_with_its_best_rate() -> None:
    first, second = (
        TransferResult(Rank(0), Rank(1), 1, 30.0),
        TransferResult(Rank(0), Rank(1), 0, 900.0),
    )
    assert first.added_to(None) == first
    assert second.added_to(first) == TransferResult(Rank(0), Rank(1), 1, 900.0)
    assert first.added_to(second) == second.added_to(first)
