"""All interleavings of small jobs, walked to the end; and proof that the walk would notice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from taskd.core.manager.repair.repair_plan import Holder, Impossible, Placement, Plan, plan
from taskd.model.ids import Step
from tests.sim import explore_repair
from tests.sim.explore_repair import Explorer
from tests.sim.explore_sharded import ShardedExplorer

SMALL = [(2, 1, 2), (2, 2, 1), (2, 2, 2), (3, 1, 1)]
"""Ranks, faults, steps."""
LARGE = [pytest.param(3, 2, 1, marks=pytest.mark.explore)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "faults", "steps"), [*SMALL, (3, 1, 2), *LARGE], ids=str)
def test_no_interleaving_loses_a_step_or_resumes_wrongly(
    ranks: int, faults: int, steps: int
) -> None:
    explorer = Explorer(ranks, faults, steps)
    assert explorer.run() > 500
    assert "trained" in explorer.endings


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "faults", "steps"), [*SMALL, *LARGE], ids=str)
def test_without_replicas_only_the_current_step_is_lost(
    ranks: int, faults: int, steps: int
) -> None:
    explorer = ShardedExplorer(ranks, faults, steps)
    assert explorer.run() > 1000
    allowed = {"trained", "lost before the first copy", "lost at the end", "no rank is left"}
    assert {"trained"} <= explorer.endings <= allowed


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "faults", "steps"), [*SMALL, *LARGE], ids=str)
def test_no_rank_goes_back_in_a_loop_over_attempts(ranks: int, faults: int, steps: int) -> None:
    explorer = ShardedExplorer(ranks, faults, steps, attempts=True)
    assert explorer.run() > 1000
    allowed = {"trained", "lost before the first copy", "lost at the end", "no rank is left"}
    assert {"trained"} <= explorer.endings <= allowed


def test_plan_that_sends_a_loop_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(
        holders: Iterable[Holder], placements: Iterable[Placement] = ()
    ) -> Plan | Impossible:
        return plan([replace(one, earliest=Step(0)) for one in holders], placements)

    monkeypatch.setattr(explore_repair, "plan", forgetful)
    with pytest.raises(AssertionError, match="cannot go back"):
        ShardedExplorer(2, 1, 2, attempts=True).run()


@pytest.mark.parametrize("kind", [Explorer, ShardedExplorer])
@pytest.mark.parametrize(("ranks", "faults", "steps"), [(2, 2, 1), (3, 1, 1)], ids=str)
def test_worlds_treated_as_equal_have_the_same_future(
    ranks: int, faults: int, steps: int, kind: type[Explorer]
) -> None:
    """Else the walk would turn back where it has not been."""
    explorer = kind(ranks, faults, steps)
    futures: dict[object, set[tuple[object, ...]]] = {}
    seen, stack = 0, [explorer._start()]
    while stack:
        world = stack.pop()
        after = [one for _, one in explorer._moves(world, ())]
        key, future = world.key(), {one.key() for one in after}
        seen += 1
        if key not in futures:
            futures[key] = future
            stack += after
        assert futures[key] == future, world
    assert seen > len(futures) * 1.5, "hardly any two were alike"


@pytest.mark.parametrize("missing", ["vote", "wait"])
def test_planted_bugs_lose_state(missing: str) -> None:
    explorer = ShardedExplorer(2, 1, 2, votes=missing != "vote", waits=missing != "wait")
    with pytest.raises(AssertionError, match="lost, with"):
        explorer.run()


def test_plan_that_drops_a_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def timid(holders: Iterable[Holder], placements: Iterable[Placement] = ()) -> Plan | Impossible:
        low = min(holder.step for holder in holders)
        return plan([holder for holder in holders if holder.step == low], placements)

    monkeypatch.setattr(explore_repair, "plan", timid)
    with pytest.raises(AssertionError, match="is lost"):
        Explorer(3, 1, 2).run()


def test_plan_that_leaves_a_rank_behind_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(
        holders: Iterable[Holder], placements: Iterable[Placement] = ()
    ) -> Plan | Impossible:
        made = plan(holders, placements)
        if isinstance(made, Impossible):
            return made
        arriving = {member.rank for member in made.replaced}
        sources = {taker: giver for taker, giver in made.sources.items() if taker in arriving}
        return Plan(made.members, made.resume, sources, made.replaced, (), made.because)

    monkeypatch.setattr(explore_repair, "plan", careless)
    with pytest.raises(AssertionError, match="resumes wrongly"):
        Explorer(3, 1, 2).run()
