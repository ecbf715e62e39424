"""At which step all ranks resume, who copies whose state, and when it is impossible."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskd.core.manager.repair.repair_plan import (
    Holder,
    Impossible,
    Placement,
    Plan,
    complete_step,
    needs,
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
    earliest: int = 0,
) -> Holder:
    kept = tuple(Copy(name, Step(at)) for name, at in copies)
    place = Rank(rank), NodeRank(node), Incarnation(0)
    return Holder(*place, Step(step), whole, undo, shard, replica, kept, Step(earliest))


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


def test_rank_that_was_no_replica_cannot_be_replaced() -> None:
    """Its state was found to differ from that of the others."""
    why = "a lost rank was not a replica of any other: their states had become different"
    survivors = [holder(0, 5, shard="rank-0@5"), holder(2, 5, shard="rank-0@5")]
    assert plan(survivors, [placement(1, shard="rank-1@5")]) == Impossible(why)
    assert plan(survivors, [placement(1)]) == Impossible(why)


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


@pytest.mark.shows("FSDP2 (`fully_shard`)", "shrink and grow", "not possible: no replica is left")
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
    found = complete_step(present, needs([*present, *arriving]))
    above = range(0 if found is None else found + 1, 5)
    for step in above:
        held = {shard for one in present for shard, at in one.offers() if at == step}
        assert not shards or not shards <= held


def test_ranks_that_have_passed_the_step_get_a_new_process() -> None:
    """Rank 2 died before its copy of step 8 was complete; ranks 0 and 1 have left step 7."""
    kept = (("a", 7), ("b", 7), ("c", 7), ("a", 8))
    repair = made(
        plan(
            [
                holder(0, 8, shard="a", copies=kept, earliest=8),
                holder(1, 8, shard="b", copies=kept, earliest=7),
            ],
            [placement(2, shard="c")],
        )
    )

    assert repair.resume == 7
    assert [(one.rank, one.incarnation) for one in repair.replaced] == [(0, 1), (2, 1)]
    assert repair.sources == {2: 1}, "rank 0 reads the copy of its predecessor"
    assert "ranks 0 have passed it" in repair.because


def test_replacements_send_each_other_the_copies_on_their_nodes() -> None:
    """All survivors have passed the step; the copy of the lost node is with its buddy."""
    repair = made(
        plan(
            [holder(0, 8, node=0, shard="a", copies=(("a", 7), ("b", 7)), earliest=8)],
            [placement(1, node=1, shard="b")],
        )
    )

    assert repair.resume == 7
    assert [one.rank for one in repair.replaced] == [0, 1]
    assert repair.sources == {1: 0}


def test_rank_at_the_step_stays() -> None:
    repair = made(plan([holder(0, 8, earliest=8), holder(1, 8, earliest=7)], [placement(2)]))

    assert repair.resume == 8
    assert [one.rank for one in repair.replaced] == [2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4))
def test_no_rank_is_asked_to_go_back_further_than_it_can(ranks: list[tuple[int, int]]) -> None:
    copies = tuple((f"s{rank}", step) for rank in range(len(ranks)) for step in range(4))
    holders = [
        holder(rank, step, shard=f"s{rank}", copies=copies, earliest=earliest)
        for rank, (step, earliest) in enumerate(ranks)
    ]
    repair = made(plan(holders))

    replaced = {one.rank for one in repair.replaced}
    assert replaced == {one.rank for one in holders if one.earliest > repair.resume}
    for taker, giver in repair.sources.items():
        assert taker != giver


def own(rank: int, step: int, *copies: Copy, whole: bool = True, undo: bool = False) -> Holder:
    """A replica with state of its own since step 2."""
    return Holder(
        Rank(rank),
        NodeRank(0),
        Incarnation(0),
        Step(step),
        whole,
        undo,
        copies=copies,
        own_since=2,
    )


def lost(rank: int, own_since: int = 2) -> Placement:
    return Placement(Rank(rank), NodeRank(0), Incarnation(1), own_since=own_since)


def test_replacement_gets_the_copy_of_what_only_it_had() -> None:
    copies = Copy("own-2", Step(5)), Copy("own-2", Step(4))
    made = plan([own(0, 5), own(1, 5, *copies)], [lost(2)])
    assert isinstance(made, Plan)
    assert (made.resume, made.sources, made.own_sources) == (5, {2: 0}, {2: 1})
    assert (made.own_since, made.shards) == (2, {2: ""})


def test_no_peer_gives_its_own_state_to_another_rank() -> None:
    made = plan([own(0, 5), own(1, 5)], [lost(2)])
    assert made == Impossible("no rank has a copy of what only a lost rank had (own-2)")


def test_before_ranks_differ_a_peer_can_give_everything() -> None:
    made = plan([own(0, 1), own(1, 1)], [lost(2, own_since=-1)])
    assert isinstance(made, Plan)
    assert (made.resume, made.sources, made.own_sources) == (1, {2: 0}, {})


def test_rank_that_has_not_said_that_it_differs_is_known_to() -> None:
    made = plan([own(0, 5), own(1, 5, Copy("own-2", Step(5)))], [lost(2, own_since=-1)])
    assert isinstance(made, Plan)
    assert made.own_sources == {2: 1}


def test_ranks_go_back_to_the_step_of_the_last_own_copy() -> None:
    made = plan([own(0, 6, undo=True), own(1, 6, Copy("own-2", Step(5)), undo=True)], [lost(2)])
    assert isinstance(made, Plan)
    assert made.resume == 5


@pytest.mark.shows(
    "pipelines (`torch.distributed.pipelining`: GPipe, 1F1B), alone and with DDP",
    "shrink and grow",
    "not possible",
)
@pytest.mark.shows(
    "expert parallelism: experts that differ by rank, all-to-all", "shrink and grow", "not possible"
)
def test_job_with_own_state_does_not_shrink() -> None:
    assert isinstance(shrink([own(0, 5), own(1, 5)], [lost(2)]), Impossible)


def in_turn(rank: int, step: int, turn: int, sections: int = 0, outside: str = "") -> Holder:
    place = Rank(rank), NodeRank(0), Incarnation(0)
    return Holder(*place, Step(step), turn=Step(turn), sections=sections, outside=outside)


def test_replacement_joins_the_turn_that_is_not_complete() -> None:
    advanced = made(plan([in_turn(0, 8, 8), in_turn(1, 8, 8)], [placement(2)]))
    assert (advanced.resume, advanced.turn, advanced.sections) == (8, 8, 0)
    behind = made(plan([in_turn(0, 8, 7), in_turn(1, 7, 7)], [placement(2)]))
    assert (behind.resume, behind.turn, behind.sections) == (8, 7, 0)
    in_setup = made(plan([holder(0, 0), holder(1, 0)], [placement(2)]))
    assert in_setup.turn == -1


def test_section_that_one_rank_has_passed_is_complete() -> None:
    repair = made(plan([in_turn(0, 8, 7, sections=1), in_turn(1, 8, 7, 2)], [placement(2)]))

    assert (repair.turn, repair.sections) == (7, 2)


def test_replacement_cannot_repeat_a_collective_that_others_have_passed() -> None:
    survivors = [in_turn(0, 8, 7, outside="train.py:41"), in_turn(1, 8, 7)]

    refused = plan(survivors, [placement(2)])
    assert isinstance(refused, Impossible)
    assert "train.py:41" in refused.because
    assert isinstance(plan(survivors), Plan), "no rank is new"
