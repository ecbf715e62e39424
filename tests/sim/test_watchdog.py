"""The watchdog on random jobs: a healthy job is never disturbed, and every hang ends in time."""

from __future__ import annotations

from math import inf

import pytest

from taskd.core.manager.watch import watchdog
from taskd.core.manager.watch.watchdog import SETTLE_S, Hung, Stalled
from tests.sim.watchdog_world import BEAT_S, CONFIG, World

SEEDS = 30
DAY_S = 86_400.0


def hang_bound(world: World) -> float:
    """The longest time until a hang is named, in any phase."""
    before = max(CONFIG.quiet_floor_s, 2 * world.state.longest_s)
    usual_s = world.state.usual_s if world.state.usual_s < inf else 0.0
    work_s = max(max(segment.seconds) for segment in world.segments)
    return before + CONFIG.stall_floor_s * 3 + CONFIG.stall_steps * usual_s + work_s + SETTLE_S


def test_healthy_job_is_never_disturbed() -> None:
    for seed in range(SEEDS):
        world = World(seed)
        world.run(DAY_S)
        assert world.finished
        assert not world.named, f"seed {seed}: {world.named[0]}"


@pytest.mark.parametrize("how", ["stopped", "deadlocked", "lost"])
def test_every_hang_is_found_in_time_and_no_other_rank_is_blamed(how: str) -> None:
    for seed in range(SEEDS):
        world = World(seed)
        world.run(world.random.uniform(2 * BEAT_S, 200.0))
        if world.finished or all(one.waiting for one in world.ranks):
            continue
        culprit = world.hang(how)
        world.run(hang_bound(world))
        found = [item for _, item in world.named]
        assert found, f"seed {seed}: {culprit} was not found"
        first = found[0]
        if isinstance(first, Stalled):
            assert how == "lost", f"seed {seed}: {first.evidence}"
        else:
            assert first.rank == culprit.rank, f"seed {seed}: {culprit}: {first.evidence}"
        if how == "stopped":
            assert isinstance(first, Hung)
            assert world.named[0][0] - world.hung_at <= 2 * CONFIG.stopped_s + 12 * BEAT_S


def test_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: signs of work are not looked at."""
    monkeypatch.setattr(watchdog, "no_work_s", lambda progress: progress.idle_s)
    worlds = [World(seed) for seed in range(20)]
    for world in worlds:
        world.run(DAY_S)
    assert any(world.named for world in worlds)


def test_planted_blindness_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: all ranks that wait for each other are taken for a slow network."""
    monkeypatch.setattr(watchdog, "stall_bound", lambda *_: inf)
    with pytest.raises(AssertionError, match="was not found"):
        test_every_hang_is_found_in_time_and_no_other_rank_is_blamed("lost")
