"""Hundreds of nodes, an unreliable network, any seed: replay one with `pytest -k seed3`."""

from __future__ import annotations

import pytest

from taskd.core.bus.routing import is_for_many
from taskd.model.codes import NetCode
from taskd.model.ids import ALL, EVERY_AGENT, EVERY_WORKER, Position, Role
from tests.sim.bus_world import World, fits
from tests.sim.seeds import seeds

SEEDS = seeds(6)
START_S, CHAOS_S, CALM_S = 5.0, 30.0, 20.0


def traffic(world: World, *, until: float, count: int) -> None:
    """All nodes send to each other, sometimes to several at once."""
    start = world.now
    for _ in range(count):

        def speak() -> None:
            src, dst = world.random.choice(world.nodes), world.random.choice(world.nodes).me
            kind = world.random.random()
            if kind < 0.02:
                dst = world.random.choice([EVERY_WORKER, EVERY_AGENT])
            elif kind < 0.06:
                some = ",".join(str(world.random.randrange(24)) for _ in range(3))
                dst = Position(Role.WORKER, some, ALL)
            world.send(src, dst, sync=world.random.random() < 0.5)

        world.at(world.random.uniform(start, until), speak)


def storm(world: World, *, kills: int, cuts: int, until: float) -> None:
    for _ in range(kills):
        victim = world.random.choice(world.nodes)
        away_s = world.random.choice([0.1, 1.0, 8.0])
        world.at(
            world.random.uniform(world.now, until),
            lambda v=victim, s=away_s: world.kill(v, for_s=s),  # type: ignore[misc]
        )
    for _ in range(cuts):
        victim = world.random.choice(world.nodes)
        world.at(world.random.uniform(world.now, until), lambda v=victim: world.cut(v))  # type: ignore[misc]


def run_through(seed: int, *, kills: int, cuts: int) -> World:
    world = World(seed)
    world.run(START_S)
    traffic(world, until=START_S + CHAOS_S, count=2500)
    storm(world, kills=kills, cuts=cuts, until=START_S + CHAOS_S)
    world.run(START_S + CHAOS_S)
    world.calm = True
    world.run(START_S + CHAOS_S + CALM_S)
    return world


def every_send_was_answered(world: World) -> None:
    for number, sending in world.sendings.items():
        if sending.src.alive and sending.src.incarnation == sending.src_incarnation:
            assert sending.results, f"{number} to {sending.dst} was never answered"


def all_nodes_are_reached(world: World) -> None:
    top = world.nodes[0]
    down = [world.send(top, node.me, sync=True) for node in world.nodes]
    up = [world.send(node, top.me, sync=True) for node in world.nodes]
    many = world.send(top, EVERY_WORKER, sync=False)
    world.run(world.now + 5.0)
    for sending in (*down, *up):
        assert sending is not None
        assert sending.results[0][0] == NetCode.OK, (sending, *world.history[-40:])
    assert many is not None
    workers = {node.me for node in world.nodes if node.me.role == Role.WORKER}
    assert {node.me for node, _ in many.delivered} == workers
    assert len(many.delivered) == len(workers)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_kills_and_cuts_break_no_guarantee(seed: int) -> None:
    world = run_through(seed, kills=60, cuts=200)
    every_send_was_answered(world)
    all_nodes_are_reached(world)
    assert world.kills > 10
    assert world.cuts > 50


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_cuts_alone_lose_nothing(seed: int) -> None:
    """No node is killed or away for longer than the grace: every accepted message arrives."""
    world = run_through(1000 + seed, kills=0, cuts=200)
    every_send_was_answered(world)
    for name, sending in world.sendings.items():
        accepted = sending.results[0][0] == NetCode.OK
        if accepted and not sending.sync and "," not in sending.dst.server_rank:
            wanted = {
                node.me
                for node in world.nodes
                if fits(sending.dst, node.me) and node is not sending.src
            }
            if not is_for_many(sending.dst):
                wanted = {sending.dst}
            assert {node.me for node, _ in sending.delivered} == wanted, f"{name} was lost"
    all_nodes_are_reached(world)


def test_same_seed_gives_the_same_run() -> None:
    assert run_through(7, kills=5, cuts=20).history == run_through(7, kills=5, cuts=20).history
