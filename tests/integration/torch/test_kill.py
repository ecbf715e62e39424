"""A rank is killed; the others stay, a replacement joins, and the result is identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run


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


@pytest.mark.shows("DDP", "lost rank")
@pytest.mark.parametrize("moment", MOMENTS)
def test_result_is_identical_after_a_kill(moment: str, calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=[(2, 0, 3, moment)])
    assert world.incarnations == {0: 0, 1: 0, 2: 1, 3: 0}
    assert_same(calm, world)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 0, 0, "in backward")], id="rank 0 in its first step"),
        pytest.param([(1, 0, 7, "after the optimizer")], id="in the last step"),
        pytest.param([(0, 0, 4, "in backward"), (3, 0, 4, "in backward")], id="two at once"),
        pytest.param([(1, 0, 2, "in forward"), (1, 1, 3, "in backward")], id="the same rank twice"),
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
def test_result_is_identical_after_several_kills(
    kills: list[Any], calm: list[Any], tmp_path: Path
) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=kills)
    assert sum(world.incarnations.values()) == len(kills)
    assert_same(calm, world)


@pytest.mark.parametrize("moment", ["in forward", "in backward", "after backward"])
def test_cut_connection_costs_no_process(moment: str, calm: list[Any], tmp_path: Path) -> None:
    world = run(tmp_path / "run", scripts.ddp, steps=8, cuts=[(1, 0, 3, moment), (2, 0, 5, moment)])
    assert world.incident >= 2
    assert sum(world.incarnations.values()) == 0
    assert_same(calm, world)


def test_no_step_is_lost_and_none_is_committed_twice(tmp_path: Path) -> None:
    kills = [(2, 0, 3, "in backward"), (1, 0, 5, "after the optimizer")]
    world = run(tmp_path / "run", scripts.ddp, steps=8, kills=kills)
    for rank in range(world.size):
        lines = (world.folder / f"log-{rank}").read_text().splitlines()
        committed = [int(line) for line in lines]
        assert committed == sorted(set(committed)), f"rank {rank}: {committed}"
        if world.incarnations[rank] == 0:
            assert committed == list(range(1, 9)), f"rank {rank}: {committed}"
