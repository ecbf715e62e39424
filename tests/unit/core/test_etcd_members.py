"""Which nodes run a member of the job's etcd."""

from __future__ import annotations

import pytest

from taskd.core.etcd_members import (
    AddLearner,
    Contact,
    ContinueAlone,
    Enough,
    MemberSeen,
    Promote,
    Remove,
    Wait,
    change,
    wanted,
    without_quorum,
)

ANSWERS, SILENT, DEAD = Contact.ANSWERS, Contact.SILENT, Contact.DEAD


def voters(*contacts: Contact) -> list[MemberSeen]:
    return [MemberSeen(at, f"node{at}", True, contact) for at, contact in enumerate(contacts)]


def learner(contact: Contact) -> MemberSeen:
    return MemberSeen(9, "node9", False, contact)


@pytest.mark.parametrize(
    ("nodes", "members"), [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (6, 5), (100, 5)]
)
def test_number_of_members_is_odd_and_at_most_five(nodes: int, members: int) -> None:
    assert wanted(nodes) == members


def test_members_join_as_learners_and_get_their_vote_afterwards() -> None:
    assert change(voters(ANSWERS), ["b", "c"]) == AddLearner(
        "b", "3 members are wanted, and 1 exist"
    )
    assert isinstance(change([*voters(ANSWERS), learner(ANSWERS)], ["c"]), Promote)
    assert isinstance(change(voters(ANSWERS, ANSWERS), ["c"]), AddLearner)


def test_fourth_node_is_kept_in_reserve() -> None:
    assert change(voters(ANSWERS, ANSWERS, ANSWERS), ["d"]) == Enough()
    assert isinstance(change(voters(ANSWERS, ANSWERS, ANSWERS), ["d", "e"]), AddLearner)


def test_dead_member_is_removed_at_once() -> None:
    found = change(voters(ANSWERS, DEAD, ANSWERS), [])
    assert isinstance(found, Remove)
    assert found.member == 1


def test_silent_member_stays_until_another_node_can_take_its_place() -> None:
    assert change(voters(ANSWERS, SILENT, ANSWERS), []) == Enough()
    assert isinstance(change(voters(ANSWERS, SILENT, ANSWERS), ["d"]), Remove)


def test_silent_members_are_removed_if_fewer_votes_are_needed_then() -> None:
    assert change(voters(ANSWERS, ANSWERS, ANSWERS, ANSWERS, SILENT), []) == Enough()
    assert isinstance(change(voters(ANSWERS, ANSWERS, ANSWERS, SILENT, SILENT), []), Remove)


def test_silent_learner_is_removed() -> None:
    assert change([*voters(ANSWERS), learner(SILENT)], []) == Remove(
        9, "node9 is silent and has no vote yet"
    )


def test_learner_keeps_waiting_if_its_vote_is_not_wanted() -> None:
    assert change([*voters(ANSWERS, ANSWERS, ANSWERS), learner(ANSWERS)], []) == Enough()


def test_one_of_two_continues_only_on_proof_of_death() -> None:
    assert isinstance(without_quorum(0, voters(ANSWERS, DEAD)), ContinueAlone)
    waits = without_quorum(0, voters(ANSWERS, SILENT))
    assert isinstance(waits, Wait)
    assert "--witness" in waits.because


def test_one_of_three_never_continues_alone() -> None:
    waits = without_quorum(0, voters(ANSWERS, DEAD, DEAD))
    assert isinstance(waits, Wait)
    assert "node1, node2" in waits.because


def test_learner_in_the_list_may_have_got_its_vote() -> None:
    assert isinstance(without_quorum(0, [*voters(ANSWERS, DEAD), learner(DEAD)]), Wait)


def test_reason_to_wait_names_the_missing_members_or_the_election() -> None:
    missing = without_quorum(0, voters(ANSWERS, SILENT, DEAD))
    assert isinstance(missing, Wait)
    assert "missing: node1, node2" in missing.because
    electing = without_quorum(0, voters(ANSWERS, ANSWERS, ANSWERS))
    assert isinstance(electing, Wait)
    assert "have not elected a leader" in electing.because
