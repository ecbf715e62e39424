"""A backend that another package has registered with torch, as torch_npu does with HCCL.

The stand-in is gloo under another name, created in each of the two ways that torch knows.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import ddp

STEPS = 6


def plugged(told: dict[str, Any]) -> None:
    """DDP over a backend that we know nothing of but its name."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        with (Path(told["folder"]) / f"created-{told['rank']}").open("a") as file:
            file.write(f"{told['life']} {rank} of {size}\n")
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def create_extended(of: Any, options: object) -> dist.ProcessGroupGloo:
        assert list(of.global_ranks_in_group) == [0, 1]
        assert of.group_id
        return create(of.store, of.group_rank, of.group_size, of.timeout)

    extended = told["extended"]
    dist.Backend.register_backend(
        "standin", create_extended if extended else create, extended_api=extended, devices=["cpu"]
    )
    ddp({**told, "backend": "standin"})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", ddp, size=2, steps=STEPS))


@pytest.mark.parametrize("extended", [False, True])
def test_a_rank_is_killed(extended: bool, calm: list[Any], tmp_path: Path) -> None:
    kills = [(1, 0, 3, "in forward")]
    world = run(tmp_path / "run", plugged, size=2, steps=STEPS, kills=kills, extended=extended)
    assert world.lives == {0: 0, 1: 1}
    assert created(world.folder / "created-0") == ["0 0 of 2", "0 0 of 2"]
    assert created(world.folder / "created-1") == ["0 1 of 2", "1 1 of 2"]
    assert_same(calm, world)


def created(note: Path) -> list[str]:
    return note.read_text().splitlines()
