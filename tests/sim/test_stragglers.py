"""Seeded jobs with one slow rank: the right rank, with the right cause, in 95 of 100."""

from __future__ import annotations

import pytest

from taskd.core.manager.watch.stragglers import Cause
from tests.sim.seeds import seeds
from tests.sim.straggler_world import World

SEEDS = seeds(60)


@pytest.mark.parametrize("cause", [*Cause, None], ids=lambda cause: str(cause or "even"))
def test_straggler_is_found_with_the_right_cause(cause: Cause | None) -> None:
    wrong = []
    for seed in SEEDS:
        world = World.of(seed, cause)
        world.run()
        if not world.is_right:
            wrong.append((seed, world.truth, world.said[:4]))
    assert len(wrong) <= (len(SEEDS) * 5 // 100 if cause else 0), wrong
