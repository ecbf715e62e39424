"""At which step all ranks resume, who copies whose state, and when it is impossible."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from taskd.core.manager.repair_plan import (
    Holder,
    Impossible,
    Placement,
    Plan,
    complete_step,
    plan,
    shrink,
)
from taskd.model.ids import Incarnation, NodeRank, Rank, Step
from taskd.model.messages import Copy, Member


def holder(
    rank: int,
    step: int,
    node: int = 0,
    whole: bool = True,
    undo: bool = False,
    shard: str = "",
    replica: int = -1,
    copies: tuple[tuple[str, int], ...] = (),
) -> Holder:
    kept = tuple(Copy(name, Step(at)) for name, at in copies)
    return Holder(
        Rank(rank), NodeRank(node), Incarnation(0), Step(step), whole, undo, shard, replica, kept
    )


def placement(rank: int, node: int = 0, shard: str = "", replica: int = -1) -> Placement:
    return Placement(Rank(rank), NodeRank(node), Incarnation(1), shard, replica)


def made(result: Plan | Impossible) -> Plan:
    assert isinstance(result, Plan), result
    return result


def test_dead_rank_copies_the_state_of_a_survivor() -> None:
    repair = made(plan([holder(0, 7), holder(1, 7)], [placement(2)]))

    assert repair.resume == 7
    assert repair.sources == {2: 0}
    assert repair.replaced == (Member(Rank(2), NodeRank(0), Incarnation(1)),)
    assert [member.rank for member in repair.members] == [0, 1, 2]


def test_survivors_behind_copy_from_one_that_is_ahead() -> None:
    repair = made(plan([holder(0, 7), holder(1, 8), holder(2, 7)], [placement(3)]))

    assert repair.resume == 8
    assert repair.sources == {0: 1, 2: 1, 3: 1}


def test_receivers_are_spread_over_the_holders() -> None:
    repair = made(plan([holder(0, 5), holder(1, 5)], [placement(r) for r in range(2, 8)]))

    assert Counter(repair.sources.values()) == {0: 3, 1: 3}


def test_other_holders_of_the_state_help_to_send_it() -> None:
    six = made(plan([holder(rank, 5) for rank in range(6)], [placement(6), placement(7)]))

    assert six.sources == {6: 0, 7: 1}
    assert six.helpers == {6: (1, 2, 3), 7: (2, 3, 4)}
    behind = made(plan([holder(0, 8), holder(1, 7), holder(2, 8, whole=False)], [placement(3)]))
    assert behind.helpers == {}, "no other rank is at step 8"


def test_no_rank_helps_with_a_snapshot() -> None:
    kept = (("b", 4),)
    survivors = [holder(0, 4, shard="a", copies=kept), holder(2, 4, shard="a", copies=kept)]
    repair = made(plan(survivors, [placement(1, shard="b")]))

    assert repair.sources == {1: 0}
    assert repair.helpers == {}


def test_source_on_the_same_node_is_preferred_until_it_has_many_receivers() -> None:
    far = [holder(rank, 5, node=1) for rank in range(4, 8)]
    repair = made(plan([holder(0, 5), *far], [placement(1), placement(2), placement(3)]))

    assert list(repair.sources.values()) == [0, 0, 0]
    more = made(plan([holder(0, 5), *far], [placement(r) for r in (1, 2, 3, 8, 9, 10)]))
    assert Counter(more.sources.values())[Rank(0)] == 3


def test_rank_with_corrupt_state_is_repaired_and_never_a_source() -> None:
    repair = made(plan([holder(0, 9, whole=False), holder(1, 8)]))

    assert repair.resume == 8
    assert repair.sources == {0: 1}


def test_plan_is_impossible_when_no_survivor_holds_state() -> None:
    assert plan([holder(0, 0, whole=False)], [placement(1)]) == Impossible(
        "no surviving rank holds any state"
    )
    assert plan([], [placement(1)]) == Impossible("no surviving rank holds any state")


def test_each_shard_is_copied_from_a_holder_of_that_shard() -> None:
    survivors = [
        holder(0, 4, shard="a", replica=0),
        holder(1, 4, shard="b", replica=0),
        holder(2, 4, shard="a", replica=1),
    ]
    repair = made(plan(survivors, [placement(3, shard="b", replica=1)]))

    assert repair.sources == {3: 1}


def test_shard_without_a_holder_is_named() -> None:
    survivors = [holder(0, 4, shard="a")]
    assert plan(survivors, [placement(1, shard="b")]) == Impossible("no rank holds shard b")


def test_shards_at_different_steps_resume_at_the_older_one_if_the_newer_can_undo() -> None:
    apart = [holder(0, 5, shard="a"), holder(1, 4, shard="b")]
    assert plan(apart) == Impossible("all shards exist, but not at the same step")

    repair = made(plan([holder(0, 5, shard="a", undo=True), holder(1, 4, shard="b")]))
    assert (repair.resume, repair.sources) == (4, {})


def test_buddys_snapshot_replaces_a_lost_shard() -> None:
    buddy = holder(0, 5, shard="a", copies=(("b", 5), ("b", 4)))
    repair = made(plan([buddy], [placement(1, shard="b")]))

    assert (repair.resume, repair.sources) == (5, {1: 0})


def test_all_ranks_resume_at_the_step_of_an_older_snapshot() -> None:
    survivor = holder(0, 5, shard="a", copies=(("b", 3), ("a", 3)))
    repair = made(plan([survivor], [placement(1, shard="b")]))

    assert (repair.resume, repair.sources) == (3, {1: 0})


def test_current_state_is_a_better_source_than_a_snapshot() -> None:
    snapshot = holder(0, 5, shard="a", copies=(("b", 5),))
    repair = made(plan([snapshot, holder(1, 5, node=1, shard="b")], [placement(2, shard="b")]))

    assert repair.sources == {2: 1}


def test_shrinking_drops_a_whole_replica() -> None:
    survivors = [
        holder(0, 4, shard="a", replica=0),
        holder(1, 4, shard="b", replica=0),
        holder(2, 4, shard="a", replica=1),
    ]
    repair = made(shrink(survivors, [placement(3, shard="b", replica=1)]))

    assert [member.rank for member in repair.members] == [0, 1]
    assert repair.leaving == (2,)


def test_shrinking_is_impossible_when_every_replica_lost_a_rank() -> None:
    survivors = [holder(0, 4, shard="a", replica=0)]
    lost = [placement(1, shard="b", replica=0)]
    assert shrink(survivors, lost) == Impossible("every replica has lost a rank")


holders = st.lists(
    st.builds(
        holder,
        rank=st.integers(0, 30),
        step=st.integers(0, 3),
        node=st.integers(0, 2),
        whole=st.booleans(),
        undo=st.booleans(),
        shard=st.sampled_from("ab"),
    ),
    max_size=6,
    unique_by=lambda one: one.rank,
)
placements = st.lists(
    st.builds(
        placement, rank=st.integers(31, 40), node=st.integers(0, 2), shard=st.sampled_from("ab")
    ),
    max_size=3,
    unique_by=lambda one: one.rank,
)


@given(holders, placements)
def test_receivers_copy_their_own_shard_at_the_common_step(
    present: list[Holder], arriving: list[Placement]
) -> None:
    result = plan(present, arriving)
    if isinstance(result, Impossible):
        return
    by_rank = {one.rank: one for one in present}
    shards = {one.rank: one.shard for one in present} | {one.rank: one.shard for one in arriving}
    for member in result.members:
        source = result.sources.get(member.rank, member.rank)
        assert (shards[member.rank], result.resume) in by_rank[source].offers()


@given(holders, placements)
def test_plan_resumes_at_the_highest_complete_step(
    present: list[Holder], arriving: list[Placement]
) -> None:
    shards = {one.shard for one in present} | {one.shard for one in arriving}
    found = complete_step(present, shards)
    above = range(0 if found is None else found + 1, 5)
    for step in above:
        held = {shard for one in present for shard, at in one.offers() if at == step}
        assert not shards or not shards <= held
