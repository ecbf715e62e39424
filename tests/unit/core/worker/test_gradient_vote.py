"""Which rank has computed a wrong gradient."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from taskd.core.worker import gradient_vote as vote
from taskd.core.worker.gradient_vote import GradientVerdict
from taskd.model.ids import Rank


def ranks(size: int) -> list[Rank]:
    return [Rank(rank) for rank in range(size)]


def right(batch: Rank) -> int:
    return 1000 + batch


class Device:
    """Computes the right result, except where it is broken."""

    def __init__(self, rank: Rank, broken: frozenset[Rank], wrong_at: frozenset[str]) -> None:
        self.rank, self.broken, self.wrong_at = rank, broken, wrong_at

    def result(self, batch: Rank, moment: str) -> int:
        is_wrong = self.rank in self.broken and moment in self.wrong_at
        return right(batch) + 7 * (self.rank + 1) if is_wrong else right(batch)


def judge(
    size: int, turn: int, broken: frozenset[Rank], wrong_at: frozenset[str]
) -> tuple[GradientVerdict, Mapping[Rank, Rank]]:
    devices = {rank: Device(rank, broken, wrong_at) for rank in ranks(size)}
    checked_by = vote.checkers(ranks(size), turn)
    own = {rank: devices[rank].result(rank, "own") for rank in devices}
    second = {rank: devices[by].result(rank, "check") for rank, by in checked_by.items()}
    third = {
        rank: devices[by].result(rank, "referee")
        for rank, by in vote.referees(vote.disputed(own, second), checked_by).items()
    }
    return vote.settle(own, second, third, checked_by), checked_by


MOMENTS = [frozenset(m) for m in (["own", "check", "referee"], ["own"], ["check"])]


@pytest.mark.parametrize(
    ("size", "turn", "wrong_at"), list(product((3, 4, 5, 8), range(5), MOMENTS))
)
def test_one_broken_device_is_named_whenever_it_fails(
    size: int, turn: int, wrong_at: frozenset[str]
) -> None:
    for rank in ranks(size):
        verdict, _ = judge(size, turn, frozenset({rank}), wrong_at)
        assert (verdict.named, verdict.doubt) == ((rank,), "")
        assert f"rank {rank} has computed" in verdict.because


@pytest.mark.parametrize("size", [3, 4, 8])
def test_healthy_devices_are_never_named(size: int) -> None:
    for turn in range(2 * size):
        verdict, _ = judge(size, turn, frozenset(), frozenset())
        assert verdict == GradientVerdict()


def test_two_broken_devices_of_eight_are_named_in_one_check() -> None:
    for one, other in product(ranks(8), ranks(8)):
        if one < other:
            verdict, checked_by = judge(8, 1, frozenset({one, other}), MOMENTS[0])
            if other in (checked_by[one], checked_by[other]) or one == checked_by[other]:
                continue  # they check each other: the next test
            assert verdict.named == (one, other)


def test_two_broken_devices_that_check_each_other_name_no_healthy_one() -> None:
    for turn in range(7):
        checked_by = vote.checkers(ranks(8), turn)
        for one in ranks(8):
            broken = frozenset({one, checked_by[one]})
            verdict, _ = judge(8, turn, broken, MOMENTS[0])
            assert set(verdict.named) <= broken


def test_three_different_results_say_nothing_about_a_device() -> None:
    checked_by = vote.checkers(ranks(3), 0)
    own = {Rank(0): 1, Rank(1): 5, Rank(2): 6}
    second = own | {Rank(0): 2}
    verdict = vote.settle(own, second, {Rank(0): 3}, checked_by)
    assert verdict.named == ()
    assert "three different gradients for the batch of rank 0" in verdict.doubt


@pytest.mark.parametrize("size", [4, 6, 8])
def test_function_that_depends_on_its_rank_names_no_device(size: int) -> None:
    """Even ranks compute something else than odd ones."""
    checked_by = vote.checkers(ranks(size), 0)
    own = {rank: right(rank) + rank % 2 for rank in checked_by}
    second = {rank: right(rank) + by % 2 for rank, by in checked_by.items()}
    referees = vote.referees(vote.disputed(own, second), checked_by)
    third = {rank: right(rank) + by % 2 for rank, by in referees.items()}
    verdict = vote.settle(own, second, third, checked_by)
    assert verdict.named == ()
    assert "ranks disagree" in verdict.doubt


def test_every_rank_checks_one_other_and_pairs_change() -> None:
    pairs = set()
    for turn in range(4):
        checked_by = vote.checkers(ranks(5), turn)
        assert sorted(checked_by.values()) == ranks(5)
        assert all(rank != by for rank, by in checked_by.items())
        pairs |= set(checked_by.items())
    assert len(pairs) == 5 * 4


def test_missing_ranks_have_no_part_in_a_check() -> None:
    left = [Rank(0), Rank(2), Rank(3)]
    assert set(vote.checkers(left, 5)) == set(vote.checkers(left, 5).values()) == set(left)


def test_referee_is_not_suspected_itself_if_possible() -> None:
    checked_by = vote.checkers(ranks(8), 0)
    disputes = [Rank(2), Rank(3)]
    chosen = vote.referees(disputes, checked_by)
    assert not set(chosen.values()) & {2, 3, 4}
    assert len(set(chosen.values())) == 2
    lone = vote.referees([Rank(0)], vote.checkers(ranks(3), 0))
    assert lone == {Rank(0): Rank(2)}
