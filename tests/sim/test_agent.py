"""A node's processes under any order of deaths and orders: replay one with `pytest -k seed7`."""

from __future__ import annotations

import pytest

from taskd.core.agent.machine import LEGAL, Done
from tests.sim.agent_world import World

SEEDS = range(300)


def play(seed: int) -> World:
    world = World(seed)
    world.run()
    return world


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_every_node_ends_and_no_process_survives(seed: int) -> None:
    world = play(seed)
    assert isinstance(world.state, Done)
    assert not world.running, "\n".join(world.trace)


def test_legal_edges_equal_edges_taken() -> None:
    walked = set().union(*(play(seed).edges for seed in SEEDS))
    drawn = {(source, target) for source, targets in LEGAL.items() for target in targets}
    assert walked == drawn


def test_a_seed_is_deterministic() -> None:
    assert play(7).trace == play(7).trace
