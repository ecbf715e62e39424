"""TaskD exchanges buffers instead of DDP; the result must be the same as with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.groups import ddp_buffers
from tests.integration.torch.runs import run, same
from tests.integration.torch.scripts import BATCH, WIDTH, batch, inject_fault
from tests.integration.torch.world import join_plain_group

STEPS, SIZE = 6, 2


class Smoothed(nn.Module):
    """Keeps running means in buffers of several types, changed in place or replaced."""

    in_place: torch.Tensor
    replaced: torch.Tensor
    transposed: torch.Tensor
    seen: torch.Tensor
    any: torch.Tensor
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("in_place", torch.zeros(WIDTH))
        self.register_buffer("replaced", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("transposed", torch.zeros(3, WIDTH).t())
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("any", torch.tensor([False, True, False]))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.in_place.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.replaced = 0.9 * self.replaced + 0.1 * x.mean(0).double()
            self.transposed.add_(x.mean())
            self.seen += BATCH
            self.any = self.any.roll(1)
            self.own += x.sum()
        scale = (self.in_place + self.replaced.float() + self.transposed[:, 0]).sigmoid()
        y: torch.Tensor = self.linear(x)
        return y * scale * (1 + 1e-3 * self.seen)


def _model() -> Any:
    torch.manual_seed(1)
    module = Smoothed()
    ddp: Any = DDP
    ddp._set_params_and_buffers_to_ignore_for_model(module, ["own"])
    return DDP(module)


def _step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Two passes without an exchange, and one with."""
    for part in range(3):
        data, _ = batch(dist.get_rank(), step, part)
        model.require_backward_grad_sync = part == 2
        torch.autograd.backward(model(data).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def plain_ddp(args: dict[str, Any]) -> None:
    join_plain_group()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        _step(model, optimizer, step)
    if dist.get_rank() == 0:
        _save(args, model)
    dist.barrier()


def protected(args: dict[str, Any]) -> None:
    ddp_buffers.MAX_MESSAGE_BYTES = args["max_bytes"]
    job = taskd.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            inject_fault(args, step, "in forward")
            _step(model, optimizer, int(step))
    _save(args, model)


def _save(args: dict[str, Any], model: Any) -> None:
    torch.save(model.module.state_dict(), Path(args["folder"]) / f"end-{args['rank']}")


def _ends(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for path in sorted(folder.glob("end-*"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("native") / "run"
    run(folder, plain_ddp, size=SIZE)
    return _ends(folder)[0]


@pytest.mark.parametrize(
    "max_bytes", [ddp_buffers.MAX_MESSAGE_BYTES, 0], ids=["as one message", "by DDP"]
)
@pytest.mark.parametrize("kills", [[], [(0, 0, 3, "in forward")]], ids=["calm", "rank 0 is lost"])
def test_buffers_are_the_same_as_with_plain_ddp(
    kills: list[Any], max_bytes: int, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run(tmp_path / "run", protected, size=SIZE, kills=kills, max_bytes=max_bytes)
    first, second = _ends(tmp_path / "run")
    own = {"own": torch.zeros(1)}  # it belongs to one rank only and is lost with it
    assert same(plain | own, first | own)
    assert same(first | own, second | own)
    assert kills or not same(first, second)
