from __future__ import annotations

from taskd.core.election import (
    SAFE_PART,
    Candidacy,
    Claim,
    Fence,
    Follow,
    JobOver,
    NotYet,
    OldBackup,
    Tenure,
    Term,
    TermsSeen,
)

LEADER = Term(3, 0, "a:9601", "a:1")


def test_only_node_zero_begins_the_first_term() -> None:
    nothing = TermsSeen(None, 0, 0)
    assert Candidacy(0).consider(nothing) == Claim(1)
    assert isinstance(Candidacy(1).consider(nothing), NotYet)


def test_any_node_takes_over_when_the_term_has_ended() -> None:
    one = Candidacy(2)
    assert one.consider(TermsSeen(LEADER, 3, 0)) == Follow(LEADER)
    assert one.consider(TermsSeen(None, 3, 0)) == Claim(4)


def test_no_node_takes_over_when_the_job_has_ended() -> None:
    one = Candidacy(2)
    one.consider(TermsSeen(LEADER, 3, 0))
    assert one.consider(TermsSeen(None, 3, 3)) == JobOver()


def test_job_of_the_same_name_starts_after_the_end_of_the_last_one() -> None:
    assert Candidacy(0).consider(TermsSeen(None, 3, 3)) == Claim(4)


def test_etcd_from_an_old_backup_is_not_used() -> None:
    one = Candidacy(2)
    one.consider(TermsSeen(LEADER, 3, 0))
    refused = one.consider(TermsSeen(None, 2, 0))
    assert isinstance(refused, OldBackup)
    assert "Restore a newer backup" in refused.because
    assert isinstance(Candidacy(2, newest=3).consider(TermsSeen(None, 2, 0)), OldBackup)
    assert Candidacy(2, newest=3).consider(TermsSeen(None, 3, 0)) == Claim(4)


def test_leader_stops_before_its_lease_ends() -> None:
    tenure = Tenure()
    assert not tenure.holds(0.0)
    tenure.begin(1, sent_at=10.0, length_s=4.0)
    assert tenure.holds(10.0 + 4.0 * SAFE_PART - 0.01)
    assert not tenure.holds(10.0 + 4.0 * SAFE_PART)
    tenure.renewed(12.0, 4.0)
    assert tenure.holds(14.9)
    tenure.end()
    tenure.renewed(13.0, 4.0)
    assert not tenure.holds(13.0), "a late answer does not begin the term again"


def test_fence_refuses_orders_of_former_leaders() -> None:
    fence = Fence()
    assert fence.admits(0), "a job without etcd has no epochs"
    assert fence.admits(2)
    assert fence.admits(2)
    assert not fence.admits(1)
    assert not fence.admits(0)
    assert fence.admits(3)
