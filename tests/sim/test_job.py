"""A job with crashes of each of its processes, any seed: replay one with `pytest -k seed7`."""

from __future__ import annotations

from functools import partial

import pytest

from taskd.core.manager.machine import BY_ORDER, LEGAL
from taskd.core.manager.states import (
    Deciding,
    Dumping,
    Gathering,
    Repairing,
    Reported,
    Suspecting,
    Training,
)
from tests.sim.job_world import World

BATCH, BATCHES = 25, 8
END_S = 20_000.0


def chaos(seed: int) -> World:
    world = World(seed)
    within_s = world.random.choice([5.0, 15.0, 60.0])
    for _ in range(world.random.choice([0, 1, 2, 4, 8, 16])):
        world.later(within_s, world.disturb)
    world.run(until=END_S)
    return world


@pytest.mark.parametrize("first", range(0, BATCH * BATCHES, BATCH), ids=lambda n: f"from{n}")
def test_every_job_ends_and_nothing_contradicts_the_truth(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            world = chaos(seed)
            world.check(world.exit_code is not None, "the job has not ended")
            assert world.manager is not None
            last = world.manager.job.world
            done = last <= world.finished
            world.check(world.exit_code != 0 or done, "ended well, but not done")
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


def test_one_killed_rank_never_costs_a_step_or_a_restart() -> None:
    for seed in range(200):
        world = World(seed, friendly=True)
        world.steps = 40
        # After all hellos: before that, it is not known whether the ranks are protected.
        world.at(world.random.uniform(4.0, 6.0), world.kill_one_that_trains)
        world.run(until=END_S)
        assert world.exit_code == 0, "\n".join(world.record)
        assert world.manager is not None
        assert world.manager.job.attempt == 0, "\n".join(world.record)
        assert len(world.finished) == world.size


def test_one_killed_rank_and_a_killed_manager_never_cost_a_step_or_a_restart() -> None:
    for seed in range(300):
        world = World(seed, friendly=True)
        world.steps = 60
        world.at(world.random.uniform(2.0, 4.0), world.kill_one_that_trains)
        world.at(world.random.uniform(1.5, 5.0), world.kill_manager)
        world.run(until=END_S)
        assert world.exit_code == 0, "\n".join(world.record)
        assert world.manager is not None
        assert world.manager.job.attempt == 0, f"seed {seed}\n" + "\n".join(world.record)


@pytest.mark.parametrize("manager_dies", [False, True])
def test_job_shrinks_after_a_lost_node_and_grows_back(manager_dies: bool) -> None:
    grown = 0
    for seed in range(200):
        world = World(seed, only="elastic-training")
        world.steps = 400
        lost = world.nodes - 1
        world.at(world.random.uniform(6.0, 8.0), partial(world.lose_node, lost, 10.0))
        if manager_dies:
            world.at(world.random.uniform(5.0, 20.0), world.kill_manager)
            world.at(world.random.uniform(5.0, 20.0), partial(world.break_stream, 5.0))
        world.run(until=END_S)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        assert world.exit_code == 0, tale
        assert world.manager is not None
        assert world.manager.job.attempt == 0, tale
        assert world.manager.job.world <= world.finished, tale
        grown += len(world.manager.job.world) == world.size
    assert grown > 150


def test_spare_node_keeps_the_world_complete() -> None:
    for seed in range(200):
        world = World(seed, only="recover")
        world.steps = 100
        world.at(world.random.uniform(6.0, 8.0), partial(world.lose_node, world.nodes - 1, 60.0))
        if seed % 2:
            world.at(world.random.uniform(5.0, 20.0), world.kill_manager)
        world.run(until=END_S)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        if world.spares or world.config.rescheduling:
            assert world.exit_code == 0, tale
            assert len(world.finished) == world.size, tale


def test_every_job_without_faults_finishes() -> None:
    for seed in range(20):
        world = World(seed)
        world.run(until=END_S)
        assert world.exit_code == 0, "\n".join(world.record)


def test_a_seed_is_deterministic() -> None:
    assert chaos(7).record == chaos(7).record


RARE = {
    (Gathering, Suspecting),
    (Reported, Training),
    (Deciding, Training),
    (Repairing, Training),
    (Dumping, Reported),
}
"""Legal, tested by tests/unit/core/manager/test_machine.py, and seldom met by chance."""


def test_legal_edges_equal_edges_taken() -> None:
    walked = set().union(*(chaos(seed).edges for seed in range(1000)))
    drawn = {(source, target) for source, targets in LEGAL.items() for target in targets}
    by_order = {(source, target) for source in LEGAL for target in BY_ORDER}
    assert walked <= drawn, walked - drawn
    assert drawn - walked <= RARE | by_order, drawn - walked - by_order
