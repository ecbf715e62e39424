"""Plain FSDP2: every shard exists once. Snapshots in shared memory outlive the rank."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import World

STEPS = 8


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.fsdp, steps=STEPS))


@pytest.mark.shows("FSDP2 (`fully_shard`)", "lost rank", "yes, from snapshots")
@pytest.mark.parametrize(
    "moment",
    [
        "between steps",
        "in forward",
        "in backward",
        "after backward",
        "in the optimizer",
        "after the optimizer",
    ],
)
def test_result_is_identical_after_a_kill(moment: str, calm: list[Any], tmp_path: Path) -> None:
    kills = [(1, 0, 2, moment), (0, 0, 5, moment)]
    world = run(tmp_path / "run", scripts.fsdp, steps=STEPS, kills=kills)
    assert world.incarnations == {0: 1, 1: 1, 2: 0, 3: 0}
    assert_same(calm, world)


def test_result_is_identical_after_all_but_one_are_killed(calm: list[Any], tmp_path: Path) -> None:
    kills = [(rank, 0, 3, "in backward") for rank in (0, 1, 3)]
    assert_same(calm, run(tmp_path / "run", scripts.fsdp, steps=STEPS, kills=kills))


def test_ranks_that_were_all_replaced_go_on_making_copies(tmp_path: Path) -> None:
    """A loop over attempts cannot go back to the last copy: the survivors are replaced, too."""
    args: dict[str, Any] = {"steps": STEPS, "by_attempts": True, "protect": {"snapshot_every": 2}}
    kills = [(1, 0, 3, "in backward"), (2, 1, 7, "in backward")]
    world = run(tmp_path / "run", scripts.fsdp, kills=kills, **args)
    assert [plan.resume for plan in world.plans] == [2, 6]
    assert_same(ends(run(tmp_path / "calm", scripts.fsdp, **args)), world)


def test_cut_connection_costs_no_process(calm: list[Any], tmp_path: Path) -> None:
    cuts = [(1, 0, 2, "in forward"), (3, 0, 4, "in backward")]
    world = run(tmp_path / "run", scripts.fsdp, steps=STEPS, cuts=cuts)
    assert sum(world.incarnations.values()) == 0
    assert_same(calm, world)


def test_result_is_identical_with_a_snapshot_every_third_step(
    calm: list[Any], tmp_path: Path
) -> None:
    kills = [(2, 0, 5, "in backward")]
    world = run(
        tmp_path / "run",
        scripts.fsdp,
        steps=STEPS,
        kills=kills,
        protect={"snapshot_every": 3},
    )
    assert_same(calm, world)


@pytest.mark.shows("FSDP2 (`fully_shard`)", "lost node", "yes, from a buddy's copy")
def test_result_is_identical_after_the_loss_of_a_node_and_its_memory(
    calm: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kills = [(2, 0, 4, "in backward"), (3, 0, 4, "in backward")]
    args = {"steps": STEPS, "kills": kills}
    world = World(scripts.fsdp, folder, args=args, ranks_per_node=2)

    async def scenario() -> None:
        try:
            await world.start()
            await world.until(lambda: world.dead == {2, 3}, "two deaths", world.run_s)
            world.lose_node(1, to=2)
            await world.recover()
            await world.until(lambda: len(world.done) == 4, "the end", world.run_s)
        finally:
            await world.stop()

    asyncio.run(scenario())
    assert_same(calm, world)
