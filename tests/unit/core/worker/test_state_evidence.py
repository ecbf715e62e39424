"""Whether a rank may be given the state of a peer, decided from the evidence of all."""

from __future__ import annotations

from taskd.core.worker.state_classes import Agreement, StatePrint
from taskd.core.worker.state_evidence import Evidence, explain, review
from taskd.model.ids import Rank

STEP = 24


def agreement(*shards: str, parts: tuple[str, ...] = ()) -> Agreement:
    return Agreement({Rank(r): name for r, name in enumerate(shards)}, parts, frozenset(parts))


def evidence(*each: Evidence) -> dict[Rank, Evidence]:
    return {Rank(rank): one for rank, one in enumerate(each)}


def holds(state: int, *parts: int, step: int = STEP, buffers: int = 0) -> Evidence:
    return Evidence(step, StatePrint(state, buffers=buffers, parts=parts))


def test_equal_survivors_may_give_their_state() -> None:
    before = agreement("", "", "", parts=("ema",))
    assert review(before, STEP, evidence(holds(7, 1), Evidence(), holds(7, 1))) == before


def test_survivors_that_differ_are_no_source_for_the_lost_rank() -> None:
    before = agreement("", "", "")
    after = review(before, STEP, evidence(holds(7), Evidence(), holds(8)))
    assert after.shards[Rank(1)] == ""
    assert "" not in (after.shards[Rank(0)], after.shards[Rank(2)])
    assert after.version == before.version + 1
    assert "ranks 0, 2 have become different" in explain(before, after)


def test_states_of_different_steps_are_not_compared() -> None:
    before = agreement("", "", "")
    shown = evidence(holds(7), holds(6, step=STEP - 1), holds(7))
    assert review(before, STEP, shown) == before


def test_shards_of_different_classes_are_not_compared() -> None:
    before = agreement("0of2", "1of2", "0of2", "1of2")
    shown = evidence(holds(1), holds(2), holds(1), Evidence())
    assert review(before, STEP, shown) == before


def test_part_or_buffers_that_differ_belong_to_each_rank() -> None:
    before = agreement("", "", "", parts=("data",))
    after = review(before, STEP, evidence(holds(7, 1), Evidence(), holds(7, 2)))
    assert after.own_parts == {"data": STEP}
    assert "data may have become different" in explain(before, after)
    shown = evidence(holds(7, 1, buffers=1), Evidence(), holds(7, 1, buffers=2))
    after = review(before, STEP, shown)
    assert after.buffers_since == STEP
    assert "buffers" in explain(before, after)


def test_sample_of_a_lost_rank_shows_that_its_only_survivor_differs() -> None:
    before = agreement("", "")
    survivor = Evidence(STEP, samples={(0, 1, 22): 5, (0, 1, 23): 6, (0, 1, 24): 7})
    lost = Evidence(samples={(0, 1, 22): 5, (0, 1, 23): 99})
    after = review(before, STEP, evidence(survivor, lost))
    assert len(set(after.shards.values())) == 2
    assert review(before, STEP, evidence(survivor, Evidence(samples={(0, 1, 22): 5}))) == before


def test_samples_since_different_incidents_are_not_compared() -> None:
    before = agreement("", "")
    survivor, lost = (
        Evidence(STEP, samples={(2, 1, 23): 6}),
        Evidence(samples={(1, 1, 23): 5, (2, 0, 23): 4}),
    )
    assert review(before, STEP, evidence(survivor, lost)) == before


def test_part_that_changed_after_the_update_for_the_first_time_is_not_given_away() -> None:
    before = agreement("", "", "", parts=("ema", "bad"))
    survivor = Evidence(STEP, late={"bad": STEP, "ema": 1})
    after = review(before, STEP, evidence(survivor, Evidence()))
    assert after.own_parts == {"bad": STEP}
    assert review(before, STEP, evidence(survivor, Evidence(STEP))) == before
    # A rank that was replaced lately sees it for the first time, but others do not.
    knows, new = Evidence(STEP, late={"ema": 1}), Evidence(STEP, late={"ema": STEP})
    assert review(before, STEP, evidence(knows, new, Evidence())) == before
    # They go back to before the change.
    assert review(before, STEP - 1, evidence(knows, Evidence())) == before
