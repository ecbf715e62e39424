"""A backend that another package has registered with torch, such as HCCL of torch_npu.

The test backend is gloo under another name, created in each of the two ways that torch has.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import Store

from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import ddp

STEPS = 6


def over_plugin(args: dict[str, Any]) -> None:
    """DDP over a backend of which only the name is known."""

    def create(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        with (Path(args["folder"]) / f"created-{args['rank']}").open("a") as file:
            file.write(f"{args['incarnation']} {rank} of {size}\n")
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    def create_extended(of: Any, options: object) -> dist.ProcessGroupGloo:
        assert list(of.global_ranks_in_group) == [0, 1]
        assert of.group_id
        return create(of.store, of.group_rank, of.group_size, of.timeout)

    extended = args["extended"]
    dist.Backend.register_backend(
        "standin", create_extended if extended else create, extended_api=extended, devices=["cpu"]
    )
    ddp({**args, "backend": "standin"})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", ddp, size=2, steps=STEPS))


@pytest.mark.parametrize("extended", [False, True])
def test_result_is_identical_after_a_kill(extended: bool, calm: list[Any], tmp_path: Path) -> None:
    kills = [(1, 0, 3, "in forward")]
    world = run(tmp_path / "run", over_plugin, size=2, steps=STEPS, kills=kills, extended=extended)
    assert world.incarnations == {0: 0, 1: 1}
    assert created(world.folder / "created-0") == ["0 0 of 2", "0 0 of 2"]
    assert created(world.folder / "created-1") == ["0 1 of 2", "1 1 of 2"]
    assert_same(calm, world)


def created(log: Path) -> list[str]:
    return log.read_text().splitlines()
