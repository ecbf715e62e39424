from __future__ import annotations

import pytest

from taskd.core.election import Election, ElectionConfig, Keep, LeaseSeen, Take, Wait

CONFIG = ElectionConfig(duration_s=10.0, give_up_s=7.0, period_s=1.0)


def election(identity: str = "b") -> Election:
    return Election(identity, CONFIG)


def test_first_process_creates_the_lease() -> None:
    assert election().consider(None, 0.0) == Take(1, None)


def test_lease_is_taken_only_after_it_was_unchanged_for_its_duration() -> None:
    one = election()
    assert one.consider(LeaseSeen("a", 3, "7"), 100.0) == Wait("a")
    assert one.consider(LeaseSeen("a", 3, "7"), 109.9) == Wait("a")
    assert one.consider(LeaseSeen("a", 3, "7"), 110.0) == Take(4, "7")


def test_each_renewal_of_the_holder_begins_the_wait_again() -> None:
    one = election()
    assert one.consider(LeaseSeen("a", 3, "7"), 100.0) == Wait("a")
    assert one.consider(LeaseSeen("a", 3, "8"), 109.0) == Wait("a")
    assert one.consider(LeaseSeen("a", 3, "8"), 115.0) == Wait("a")
    assert one.consider(LeaseSeen("a", 3, "8"), 119.0) == Take(4, "8")


def test_next_try_comes_when_the_lease_expires() -> None:
    """Not up to a whole period later."""
    one = election()
    assert one.pause_s(100.0) == CONFIG.period_s
    one.consider(LeaseSeen("a", 3, "7"), 100.3)
    assert one.pause_s(105.0) == CONFIG.period_s
    assert one.pause_s(110.0) == pytest.approx(0.3)
    assert one.pause_s(110.3) == CONFIG.period_s, "it has expired: the last try failed"


def test_released_lease_is_taken_at_once() -> None:
    assert election().consider(LeaseSeen("", 3, "7"), 0.0) == Take(4, "7")


def test_deleted_lease_is_written_again_by_its_holder_in_the_same_term() -> None:
    one = election()
    one.consider(LeaseSeen("", 3, "7"), 0.0)
    one.written(4, sent_at=0.0)
    assert one.consider(None, 1.0) == Keep(4, None)


def test_deleted_lease_of_another_holder_is_taken_when_it_would_have_expired() -> None:
    one = election()
    assert one.consider(LeaseSeen("a", 3, "7"), 100.0) == Wait("a")
    assert one.consider(None, 109.9) == Wait("a")
    assert one.consider(None, 110.0) == Take(4, None)


def test_term_begins_above_all_that_have_existed() -> None:
    """Whether the lease was deleted, or its count was set back."""
    one = election()
    assert one.consider(None, 0.0, above=6) == Take(7, None)
    one.written(4, sent_at=0.0)
    assert one.consider(LeaseSeen("b", 4, "8"), 1.0, above=6) == Take(7, "8")
    assert one.consider(LeaseSeen("b", 4, "8"), 1.0, above=3) == Keep(4, "8")


def test_own_write_whose_answer_was_lost_is_followed_by_a_new_term() -> None:
    assert election().consider(LeaseSeen("b", 4, "8"), 0.0) == Take(5, "8")


def test_leader_keeps_its_lease_and_stops_when_it_cannot_renew() -> None:
    one = election()
    one.written(4, sent_at=100.0)
    assert one.consider(LeaseSeen("b", 4, "8"), 101.0) == Keep(4, "8")
    assert one.leads(106.9)
    assert not one.leads(107.0)
    one.written(4, sent_at=107.0)
    assert one.leads(110.0)
    one.lost()
    assert not one.leads(110.0)


def test_leader_stops_before_any_other_process_can_take_over() -> None:
    """The follower first sees a renewal after the leader has sent it, on its own clock."""
    leader, follower = election("a"), election("b")
    leader.written(1, sent_at=50.0)
    follower.consider(LeaseSeen("a", 1, "1"), 50.0 + 1000.0)
    takes = next(
        now
        for now in range(200)
        if isinstance(follower.consider(LeaseSeen("a", 1, "1"), 1050.0 + now), Take)
    )
    assert not leader.leads(50.0 + takes)


def test_impossible_durations_are_refused() -> None:
    with pytest.raises(ValueError, match="give_up_s"):
        ElectionConfig(duration_s=5.0, give_up_s=7.0)
