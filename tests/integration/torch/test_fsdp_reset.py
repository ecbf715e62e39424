"""FSDP2 forgets a step that was left in the middle: as torch does it, and as we do for older ones.

An older torch itself is met by `tests/gpu` only, on machines that have one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from taskd.torch.state import fsdp_reset as fsdp
from taskd.torch.state import sharded
from tests.integration.torch.runs import run
from tests.integration.torch.world import join_natively

SIZE, WIDTH, DEPTH = 2, 8, 3


class Left(Exception): ...


class Trap(nn.Module):
    """Leaves the pass that it is set for."""

    def __init__(self) -> None:
        super().__init__()
        self.set_for = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.set_for == "forward":
            raise Left
        if self.set_for == "backward":
            hooked: Any = x
            hooked.register_hook(_leave)
        return x


def _leave(_: torch.Tensor) -> None:
    raise Left


def lose(told: dict[str, Any]) -> None:
    if told["older"]:
        del FSDPState._reset_iter_state
    join_natively()
    torch.manual_seed(0)
    trap = Trap()
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model: Any = nn.Sequential(parts[0], trap, *parts[1:])
    for part in (*parts, model):
        fully_shard(part)
    assert all(fsdp.can_reset(state) for state in sharded._states(model))

    def gradients(step: int) -> list[torch.Tensor]:
        torch.manual_seed(10 * step + told["rank"])
        model.zero_grad()
        torch.autograd.backward(model(torch.randn(4, WIDTH)).square().sum())
        return [sharded.local(one.grad) for one in model.parameters()]

    calm = [gradients(step) for step in range(3)]
    for step, expected in enumerate(calm):
        trap.set_for = told["left"]
        try:
            gradients(step)
        except Left:
            sharded.forget(model)
        else:
            raise AssertionError("the trap was not set")
        trap.set_for = ""
        assert all(map(torch.equal, gradients(step), expected))
    (Path(told["folder"]) / f"done-{told['rank']}").touch()
    dist.barrier()


@pytest.mark.parametrize("left", ["forward", "backward"])
@pytest.mark.parametrize("older", [False, True], ids=["by itself", "with our help"])
def test_the_next_pass_is_as_if_nothing_had_been(older: bool, left: str, tmp_path: Path) -> None:
    run(tmp_path / "run", lose, size=SIZE, older=older, left=left)
    assert len(list((tmp_path / "run").glob("done-*"))) == SIZE


def test_one_that_is_built_otherwise_is_not_touched() -> None:
    assert not fsdp.can_reset(object())
