"""Random faults and an unreliable network for any seed; replay one with `chaos(7)`."""

from __future__ import annotations

import json

import pytest

from taskd.core.clusterd.machine import LEGAL
from taskd.core.clusterd.states import Ended, Idle, Shrunk, State
from taskd.model.faults import FaultKind
from taskd.wire.json_codec import from_plain, to_plain
from tests.sim.clusterd_truth import AWAY, ERRING, TRAINING
from tests.sim.clusterd_world import TROUBLE_S, World
from tests.sim.seeds import seeds

SEEDS = 2_400
BATCH = 100
PEACE_S = 30_000.0


def chaos(seed: int, deletes_pods: bool = False) -> World:
    world = World(seed, deletes_pods)
    for _ in range(world.random.randint(1, 5)):
        world.later(TROUBLE_S, lambda: cascade(world))
    world.run(until=TROUBLE_S + PEACE_S)
    return world


def cascade(world: World) -> None:
    """One event after another, at the pace of a round."""
    trouble(world)
    if world.chance(0.65):
        world.later(world.random.choice([10.0, 60.0]), lambda: cascade(world))


def trouble(world: World) -> None:
    truth, random = world.truth, world.random
    rank = random.choice(list(truth.ranks))
    if truth.ended:
        return
    happens = ["death", "death", "error", "error", "device", "client", "clusterd", "operator"]
    happens += {"hot switch": ["device"] * 8, "operations": ["operator"] * 6}.get(world.theme, [])
    match random.choice(happens):
        case "death":
            truth.kill(rank)
            world.client.report_faults()
        case "error" if truth.ranks[rank] == TRAINING:
            truth.ranks[rank] = ERRING
            world.client.kinds[rank] = random.choice([FaultKind.MEMORY, FaultKind.NETWORK])
            world.client.report_faults()
        case "device":
            world.cluster.break_device(rank)
        case "client":
            world.client.die()
        case "clusterd" if world.up:
            world.crash()
        case "operator":
            random.choice([world.cluster.ask_nic, world.cluster.ask_stress])()
        case _:
            pass
    if world.job.platform and world.chance(0.2 if world.theme == "hot switch" else 0.8):
        errs = bool(truth.all_of(ERRING))
        words = ["retry"] * 6 * errs + ["recover", "recover", "dump", "exit", " ", ""]
        world.cluster.platform_names(random.choice(words))


def examine(world: World) -> None:
    """Long after the last fault: is everything as it should be?"""
    state, truth = world.state, world.truth
    world.check(isinstance(state, Idle | Shrunk | Ended), f"the round never ended: {state}")
    world.check(world.cluster.asked == 0, "an operator was never answered")
    if isinstance(state, Idle):
        idle = [rank for rank, status in truth.ranks.items() if status != TRAINING]
        world.check(not idle, f"ranks {idle} are forgotten: {truth.ranks}")
        world.check(not world.cluster.paused, "the mark `pause` was left behind")
    if isinstance(state, Shrunk):
        away = truth.all_of(AWAY)
        world.check(set(away) <= set(state.round.ranks), f"{away} left, {state.round.ranks} known")
        world.check(len(truth.all_of(AWAY, TRAINING)) == len(truth.ranks), f"{truth.ranks}")


walked: set[tuple[type[State], type[State]]] = set()
batches: set[int] = set()


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH), ids=lambda first: f"from{first}")
def test_every_round_ends(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            world = chaos(seed)
            examine(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        walked.update(world.edges)
    batches.add(first)


def test_every_round_ends_where_clusterd_deletes_the_pods() -> None:
    for seed in seeds(2 * BATCH):
        try:
            examine(chaos(seed, deletes_pods=True))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


def test_edges_walked_equal_edges_drawn() -> None:
    """The edges that the seeds above have walked."""
    if len(batches) < SEEDS // BATCH:
        pytest.skip("only all seeds together walk every edge")
    drawn = {(source, target) for source, targets in LEGAL.items() for target in targets}
    assert walked - drawn == set()
    assert drawn - walked == set()


def test_simulation_is_deterministic_for_a_seed() -> None:
    assert chaos(7).story == chaos(7).story


def test_every_state_survives_the_journal() -> None:
    """A state that is written as plain JSON is read back unchanged."""
    for seed in seeds(40):
        for state in chaos(seed).states:
            plain = json.loads(json.dumps(to_plain(state)))
            assert from_plain(type(state), plain) == state
