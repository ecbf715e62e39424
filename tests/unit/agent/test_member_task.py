"""A keeper of etcd that is started again knows the members that were seen last."""

from __future__ import annotations

from dataclasses import replace

from taskd.agent.etcd_member.member_main import MemberTask

TASK = MemberTask(
    binary="etcd",
    version="3.4.23",
    job="job",
    name="node2",
    order=2,
    first=False,
    home="10.0.0.1:9603",
    at_home=False,
    seeds=("10.0.0.1:9603",),
    folder="/tmp",
    certificate=None,
)


def test_members_that_were_seen_last_are_known_after_a_restart() -> None:
    plan = TASK.plan(("10.0.0.2:40001", "10.0.0.1:9603", "10.0.0.3:40002"))
    assert list(map(str, plan.seeds)) == ["10.0.0.1:9603", "10.0.0.2:40001", "10.0.0.3:40002"]


def test_first_seed_stays_the_first_one() -> None:
    """The port of the first node's member, and the way to it, are taken from it."""
    assert str(replace(TASK, first=True).plan(("10.0.0.2:40001",)).seeds[0]) == "10.0.0.1:9603"
