"""All interleavings of a small etcd's members, and proof that the search would notice a bug."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from taskd.core import etcd_members
from taskd.core.etcd_members import Contact, ContinueAlone, MemberSeen, Wait
from tests.sim.explore_members import MembersExplorer

SMALL = [(2, 2, 4), (3, 1, 4), (3, 2, 4)]
"""Machines, faults, launchers."""
LARGE = [pytest.param(3, 3, 5, marks=pytest.mark.explore)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("machines", "faults", "most"), [*SMALL, *LARGE], ids=str)
def test_two_clusters_never_decide(machines: int, faults: int, most: int) -> None:
    explorer = MembersExplorer(machines, faults, most)
    assert explorer.run() > 100
    assert {"waits", "continues alone", f"{machines} members"} <= explorer.endings


def on_silence(me: int, members: Sequence[MemberSeen]) -> ContinueAlone | Wait:
    """Continues although the other one may only be cut off."""
    others = [one for one in members if one.id != me]
    return ContinueAlone("") if len(others) == 1 else Wait("")


def with_more_members(me: int, members: Sequence[MemberSeen]) -> ContinueAlone | Wait:
    """Takes any number of dead members for proof: they may have made changes without this one."""
    others = [one for one in members if one.id != me]
    return ContinueAlone("") if all(one.contact is Contact.DEAD for one in others) else Wait("")


def without_learners(me: int, members: Sequence[MemberSeen]) -> ContinueAlone | Wait:
    """Forgets that a learner may have got its vote in the meantime."""
    others = [one for one in members if one.id != me and one.votes]
    dead = [one for one in others if one.contact is Contact.DEAD]
    return ContinueAlone("") if len(others) == 1 and dead else Wait("")


@pytest.mark.parametrize(
    ("planted", "faults"),
    [
        (on_silence, 2),
        pytest.param(with_more_members, 3, marks=pytest.mark.explore),
        pytest.param(without_learners, 2, marks=pytest.mark.explore),
    ],
)
def test_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, planted: object, faults: int
) -> None:
    monkeypatch.setattr(etcd_members, "without_quorum", planted)
    with pytest.raises(AssertionError, match=r"two clusters can decide|continues without several"):
        MembersExplorer(4, faults, 4).run()
