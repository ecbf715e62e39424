"""FSDP2 on a mesh with replicas: a lost shard is received from the rank that holds the same one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run

STEPS = 8


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.hsdp, steps=STEPS))


@pytest.mark.shows("HSDP (FSDP2 on a two-dimensional mesh)", "lost rank")
@pytest.mark.parametrize(
    "moment",
    ["between steps", "in forward", "in backward", "after backward", "in the optimizer"],
)
def test_result_is_identical_after_a_kill(moment: str, calm: list[Any], tmp_path: Path) -> None:
    kills = [(1, 0, 2, moment), (0, 0, 5, moment)]
    world = run(tmp_path / "run", scripts.hsdp, steps=STEPS, kills=kills)
    assert world.incarnations == {0: 1, 1: 1, 2: 0, 3: 0}
    assert_same(calm, world)


def test_result_is_identical_after_the_loss_of_a_replica(calm: list[Any], tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward"), (3, 0, 3, "in backward")]
    assert_same(calm, run(tmp_path / "run", scripts.hsdp, steps=STEPS, kills=kills))


@pytest.mark.parametrize("moment", ["in forward", "in backward"])
def test_cut_connection_costs_no_process(moment: str, calm: list[Any], tmp_path: Path) -> None:
    cuts = [(1, 0, 2, moment), (3, 0, 4, moment)]
    world = run(tmp_path / "run", scripts.hsdp, steps=STEPS, cuts=cuts)
    assert sum(world.incarnations.values()) == 0
    assert_same(calm, world)


def test_hello_names_the_shard_and_the_replica(tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.hsdp, steps=2)
    shards = [world.hellos[rank].shard for rank in range(4)]
    assert shards[0] == shards[2] != shards[1] == shards[3]
    assert [world.hellos[rank].replica for rank in range(4)] == [0, 0, 1, 1]
