"""Runs a script in a small world to its end, and compares the results of two runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from tests.integration.torch.world import Script, World


def run(
    folder: Path,
    script: Script,
    run_s: float = 150.0,
    size: int = 4,
    ranks_per_node: int = 4,
    **args: Any,
) -> World:
    folder.mkdir(parents=True)
    world = World(script, folder, size, args, ranks_per_node, run_s)
    run_scenario(world, world.run)
    return world


def lose_and_checkpoint(
    folder: Path,
    script: Script,
    *kills: tuple[int, int, int, str],
    steps: int,
    ranks_per_node: int = 4,
    then: Callable[[World], None] = lambda world: None,
) -> World:
    """A run that loses ranks, and whose survivors write the emergency checkpoint."""
    folder.mkdir()
    args = {"steps": steps, "kills": kills}
    world = World(script, folder, args=args, ranks_per_node=ranks_per_node)

    async def scenario() -> None:
        await world.start()
        await world.until(lambda: len(world.dead) == len(kills), "the deaths", world.run_s)
        then(world)
        await world.dump()

    run_scenario(world, scenario)
    return world


def run_scenario(world: World, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it and end every process of this world, however the scenario ends."""

    async def run_and_stop() -> None:
        try:
            await scenario()
        finally:
            await world.stop()

    asyncio.run(run_and_stop())


def ends(world: World) -> list[Any]:
    return [torch.load(world.folder / f"end-{rank}.pt") for rank in range(world.size)]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_same(calm: list[Any], world: World) -> None:
    for rank, (undisturbed, disturbed) in enumerate(zip(calm, ends(world), strict=True)):
        for part in undisturbed:
            assert same(undisturbed[part], disturbed[part]), f"{part} of rank {rank}"
