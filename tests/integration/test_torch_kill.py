"""A rank is killed; the others stay, a new one joins, and not a bit of the result is different."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import torch_scripts as scripts
from tests.integration.torch_world import World


def run(folder: Path, script: Any, **told: Any) -> World:
    folder.mkdir()
    world = World(script, folder, told=told)

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
    return bool(one == other)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.ddp, steps=8))


MOMENTS = [
    "between steps",
    "in forward",
    "in backward",
    "after backward",
    "in the optimizer",
    "after the optimizer",
]


def assert_same(calm: list[Any], world: World) -> None:
    for rank, (undisturbed, disturbed) in enumerate(zip(calm, ends(world), strict=True)):
        for part in undisturbed:
            assert same(undisturbed[part], disturbed[part]), f"{part} of rank {rank}"


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_result_is_the_same_in_every_bit(moment: str, calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=[(2, 0, 3, moment)])
    assert world.lives == {0: 0, 1: 0, 2: 1, 3: 0}
    assert_same(calm, world)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 0, 0, "in backward")], id="rank 0 in its first step"),
        pytest.param([(1, 0, 7, "after the optimizer")], id="in the last step"),
        pytest.param([(0, 0, 4, "in backward"), (3, 0, 4, "in backward")], id="two at once"),
        pytest.param([(1, 0, 2, "in forward"), (1, 1, 3, "in backward")], id="the same again"),
        pytest.param(
            [(0, 0, 4, "in forward"), (1, 0, 4, "in forward"), (2, 0, 4, "in backward")],
            id="all but one",
        ),
        pytest.param(
            [(2, 0, 1, "in forward"), (2, 1, 1, "joining"), (2, 2, 4, "in the optimizer")],
            id="the replacement dies too",
        ),
    ],
)
def test_harder_losses(kills: list[Any], calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=kills)
    assert sum(world.lives.values()) == len(kills)
    assert_same(calm, world)


@pytest.mark.parametrize("moment", ["in forward", "in backward", "after backward"])
def test_a_link_that_flaps_costs_no_process(moment: str, calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, cuts=[(1, 0, 3, moment), (2, 0, 5, moment)])
    assert world.incident >= 2
    assert sum(world.lives.values()) == 0
    assert_same(calm, world)


def test_no_step_is_lost_and_none_is_done_twice(tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward"), (1, 0, 5, "after the optimizer")]
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=kills)
    for rank in range(world.size):
        lines = (world.folder / f"log-{rank}").read_text().splitlines()
        committed = [int(line) for line in lines]
        assert committed == sorted(set(committed)), f"rank {rank}: {committed}"
        if world.lives[rank] == 0:
            assert committed == list(range(1, 9)), f"rank {rank}: {committed}"
