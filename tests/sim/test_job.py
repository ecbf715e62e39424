"""A job with crashes of each of its processes, any seed: replay one with `pytest -k seed7`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from taskd.core.clusterd import new_faults
from taskd.core.clusterd.round.round_start import begin
from taskd.core.clusterd.round.turn import Turn
from taskd.core.clusterd.states import Outcome, Stopping
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
from taskd.model.faults import Fault
from tests.sim.job_world import World
from tests.sim.seeds import seeds

BATCH, BATCHES = 25, 8
END_S = 20_000.0


def chaos(seed: int) -> World:
    world = World(seed)
    within_s = world.random.choice([5.0, 15.0, 60.0])
    for _ in range(world.random.choice([0, 1, 2, 4, 8, 16])):
        world.later(within_s, world.disturb)
    world.run(until=END_S)
    return world


def incidents(world: World) -> int:
    assert world.manager is not None
    return len(world.manager.job.past_incidents)


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
    for seed in seeds(200):
        world = World(seed, friendly=True)
        world.steps = 40
        # After all hellos: before that, it is not known whether the ranks are protected.
        world.at(world.random.uniform(4.0, 6.0), world.kill_one_that_trains)
        world.run(until=END_S)
        assert world.exit_code == 0, "\n".join(world.record)
        assert world.manager is not None
        assert world.manager.job.attempt == 0, "\n".join(world.record)
        assert len(world.finished) == world.size


@pytest.mark.parametrize("exit_seen_s", [0.05, 0.5])
@pytest.mark.parametrize("protected", [True, False], ids=["protected", "unprotected"])
def test_one_killed_rank_is_one_incident(protected: bool, exit_seen_s: float) -> None:
    """Also when its peers lose their connections long before the agent sees its end."""
    for seed in seeds(200):
        world = one_kill(seed, protected, exit_seen_s)
        assert incidents(world) == 1, f"seed {seed}\n" + "\n".join(world.record)


def test_planted_bug_makes_two_incidents_of_one_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: clusterd starts another incident for the death that explains a lost connection."""

    def start_another(state: Stopping, turn: Turn, faults: tuple[Fault, ...]) -> Outcome:
        return begin(state.job, faults, turn.now, turn.config, turn.because, before=state.round)

    monkeypatch.setattr(new_faults, "absorb", start_another)
    assert any(incidents(one_kill(seed, True, 0.5)) > 1 for seed in range(50))


def one_kill(seed: int, protected: bool, exit_seen_s: float) -> World:
    world = World(seed, friendly=True)
    world.steps, world.protected, world.exit_seen_s = 40, protected, exit_seen_s
    world.at(world.random.uniform(4.0, 6.0), world.kill_one_that_trains)
    world.run(until=END_S)
    return world


def test_one_killed_rank_and_a_killed_manager_never_cost_a_step_or_a_restart() -> None:
    for seed in seeds(300):
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
    for seed in seeds(200):
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
    assert grown > len(seeds(150))


def test_spare_node_keeps_the_world_complete() -> None:
    for seed in seeds(200):
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


def test_node_that_is_cut_off_for_a_moment_comes_back() -> None:
    for seed in seeds(200):
        world = World(seed, only="recover")
        world.steps, world.config = 100, replace(world.config, rescheduling=True)
        for _ in range(world.random.choice([1, 2])):
            cut = partial(world.blip, world.nodes - 1, world.random.uniform(0.8, 3.0))
            world.at(world.random.uniform(6.0, 12.0), cut)
        world.at(25.0, world.check_no_rank_runs_twice)
        world.run(until=200.0)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        assert world.exit_code == 0, tale
        assert len(world.finished) == world.size, tale
        assert world.manager is not None
        assert world.manager.job.attempt == 0, tale


@pytest.mark.parametrize("cuts", [2, 3])
def test_cuts_while_the_leader_changes_end_no_job(cuts: int) -> None:
    """A new leader hears ranks that were replaced before, and finds repairs that are half done."""
    for seed in seeds(600):
        world = World(seed, only="retry,recover", etcd=True)
        world.steps = 200
        for _ in range(cuts):
            node = world.random.randrange(world.nodes)
            cut = partial(world.blip, node, world.random.uniform(0.8, 3.0))
            world.at(world.random.uniform(6.0, 14.0), cut)
            world.at(world.random.uniform(6.0, 14.0), world.kill_manager)
        world.run(until=END_S)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        assert world.exit_code == 0, tale
        assert len(world.finished) == world.size, tale


def test_shrunk_job_grows_back_when_the_node_was_only_cut_off() -> None:
    grown = 0
    for seed in seeds(100):
        world = World(seed, only="elastic-training")
        world.steps = 400
        world.at(8.0, partial(world.blip, world.nodes - 1, world.random.uniform(1.2, 3.0)))
        world.run(until=END_S)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        assert world.exit_code == 0, tale
        assert world.manager is not None
        grown += len(world.manager.job.world) == world.size
    assert grown > len(seeds(90))


def test_shrunk_job_grows_back_after_further_faults() -> None:
    grown = 0
    for seed in seeds(30):
        world = World(seed, only="retry,elastic-training")
        world.steps = 400
        world.at(8.0, partial(world.lose_node, world.nodes - 1, 30.0))
        world.at(14.0, world.cut_one)
        world.run(until=END_S)
        tale = f"seed {seed}\n" + "\n".join(world.record[-300:])
        assert world.exit_code == 0, tale
        assert world.manager is not None
        grown += len(world.manager.job.world) == world.size
    assert grown >= len(seeds(25))


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
