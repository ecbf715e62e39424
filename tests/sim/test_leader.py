"""Never two leaders whose orders are obeyed; and the simulation finds the bugs that are planted."""

from __future__ import annotations

import pytest

from tests.sim.leader_world import BUGS, World

SEEDS = range(300)


def test_no_order_of_a_former_leader_is_obeyed() -> None:
    terms = stale = obeyed = 0
    for seed in SEEDS:
        world = World(seed)
        world.run()
        terms, stale, obeyed = (
            terms + world.terms,
            stale + world.stale,
            obeyed + world.obeyed,
        )
    assert terms > 2 * len(SEEDS), "the leader changes"
    assert stale > len(SEEDS), "orders of former leaders arrive"
    assert obeyed > 100 * len(SEEDS), "the job is led"


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    def breaks(seed: int) -> bool:
        try:
            World(seed, bug).run()
        except AssertionError:
            return True
        return False

    assert any(breaks(seed) for seed in SEEDS)
