"""FSDP2 is reset after a step that was left in the middle: by torch, and by us for older versions.

`make test-torch TORCH=2.12.1` and older ones run this with a torch that cannot do it itself.
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

from taskd.errors import UnknownTorch
from taskd.torch import compat
from taskd.torch.state import sharded
from tests.integration.torch.runs import run
from tests.integration.torch.world import join_plain_group

SIZE, WIDTH, DEPTH = 2, 8, 3


class Left(Exception): ...


class Trap(nn.Module):
    """Raises in the pass that it is set for."""

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


def abandon_steps(args: dict[str, Any]) -> None:
    if args["older"] and hasattr(FSDPState, "_reset_iter_state"):
        del FSDPState._reset_iter_state
    join_plain_group()
    torch.manual_seed(0)
    trap = Trap()
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model: Any = nn.Sequential(parts[0], trap, *parts[1:])
    for part in (*parts, model):
        fully_shard(part)
    compat.check_fsdp(compat.fsdp_states(model))

    def gradients(step: int) -> list[torch.Tensor]:
        torch.manual_seed(10 * step + args["rank"])
        model.zero_grad()
        torch.autograd.backward(model(torch.randn(4, WIDTH)).square().sum())
        return [sharded.local(one.grad) for one in model.parameters()]

    calm = [gradients(step) for step in range(3)]
    for step, expected in enumerate(calm):
        trap.set_for = args["left"]
        try:
            gradients(step)
        except Left:
            sharded.reset(model)
        else:
            raise AssertionError("the trap did not raise")
        trap.set_for = ""
        assert all(map(torch.equal, gradients(step), expected))
    (Path(args["folder"]) / f"done-{args['rank']}").touch()
    dist.barrier()


@pytest.mark.parametrize("left", ["forward", "backward"])
@pytest.mark.parametrize("older", [False, True], ids=["by torch", "by compat"])
def test_next_pass_is_not_affected(older: bool, left: str, tmp_path: Path) -> None:
    run(tmp_path / "run", abandon_steps, size=SIZE, older=older, left=left)
    assert len(list((tmp_path / "run").glob("done-*"))) == SIZE


def test_fsdp_of_unknown_structure_is_refused() -> None:
    with pytest.raises(UnknownTorch, match="_reset_iter_state"):
        compat.check_fsdp([object()])
