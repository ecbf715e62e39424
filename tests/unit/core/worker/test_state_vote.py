"""Which ranks are named when replicas differ."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.worker.state_vote import Fingerprint, judge
from taskd.model.ids import Rank


def prints(*states: int, shards: tuple[int, ...] = (), agreed: int = 4) -> dict[Rank, Fingerprint]:
    shards = shards or (0,) * len(states)
    return {
        Rank(rank): Fingerprint(shard, state, agreed)
        for rank, (shard, state) in enumerate(zip(shards, states, strict=True))
    }


def test_no_rank_is_named_when_all_agree() -> None:
    assert judge(prints(7, 7, 7, 7)).named == ()


def test_single_differing_rank_is_named() -> None:
    verdict = judge(prints(7, 7, 9, 7))
    assert verdict.named == (2,)
    assert verdict.because == "the state of rank 2 differs from that of ranks 0, 1, 3"
    assert verdict.agreed == 4


def test_two_ranks_that_differ_in_different_ways_are_named() -> None:
    assert judge(prints(7, 8, 7, 9, 7)).named == (1, 3)


def test_all_ranks_are_named_without_a_majority() -> None:
    verdict = judge(prints(7, 9))
    assert verdict.named == (0, 1)
    assert "none has a majority" in verdict.because
    assert judge(prints(7, 7, 9, 9)).named == (0, 1, 2, 3)


def test_each_shard_is_judged_separately() -> None:
    assert judge(prints(7, 1, 7, 2, 7, 1, shards=(0, 1, 0, 1, 0, 1))).named == (3,)


def test_shard_with_one_holder_is_not_judged() -> None:
    assert judge(prints(7, 8, 9, shards=(0, 1, 2))).named == ()


def test_newly_joined_rank_does_not_lower_the_agreed_step() -> None:
    fingerprints = prints(7, 9, agreed=6) | {Rank(2): Fingerprint(0, 5, -1)}
    assert judge(fingerprints).agreed == 6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_majority_is_never_named(states: list[int]) -> None:
    named = set(judge(prints(*states)).named)
    for state in set(states):
        holders = {rank for rank, one in enumerate(states) if one == state}
        if 2 * len(holders) > len(states):
            assert named == set(range(len(states))) - holders
