"""Runs a script in a small world to its end, and compares how two runs ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch

from tests.integration.torch_world import Script, World


def run(folder: Path, script: Script, run_s: float = 150.0, size: int = 4, **told: Any) -> World:
    folder.mkdir()
    world = World(script, folder, size, told=told, run_s=run_s)

    async def live() -> None:
        try:
            await world.run()
        finally:
            await world.stop()

    asyncio.run(live())
    return world


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
