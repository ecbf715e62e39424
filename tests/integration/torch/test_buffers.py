"""Buffers are exchanged by us instead of DDP; they must be what DDP would have made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.groups import ddp_buffers as buffers
from tests.integration.torch.runs import run, same
from tests.integration.torch.scripts import BATCH, WIDTH, batch, strike
from tests.integration.torch.world import join_natively

STEPS, SIZE = 6, 2


class Smoothed(nn.Module):
    """Keeps means of what it has seen: of several types, changed in place, and put in anew."""

    in_place: torch.Tensor
    anew: torch.Tensor
    turned: torch.Tensor
    seen: torch.Tensor
    any: torch.Tensor
    own: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("in_place", torch.zeros(WIDTH))
        self.register_buffer("anew", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("turned", torch.zeros(3, WIDTH).t())
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("any", torch.tensor([False, True, False]))
        self.register_buffer("none", torch.zeros(0))
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.in_place.mul_(0.9).add_(x.mean(0), alpha=0.1)
            self.anew = 0.9 * self.anew + 0.1 * x.mean(0).double()
            self.turned.add_(x.mean())
            self.seen += BATCH
            self.any = self.any.roll(1)
            self.own += x.sum()
        scale = (self.in_place + self.anew.float() + self.turned[:, 0]).sigmoid()
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


def native(told: dict[str, Any]) -> None:
    join_natively()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        _step(model, optimizer, step)
    if dist.get_rank() == 0:
        _tell(told, model)
    dist.barrier()


def protected(told: dict[str, Any]) -> None:
    buffers.SMALL = told["small"]
    job = taskd.init()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            strike(told, step, "in forward")
            _step(model, optimizer, int(step))
    _tell(told, model)


def _tell(told: dict[str, Any], model: Any) -> None:
    torch.save(model.module.state_dict(), Path(told["folder"]) / f"end-{told['rank']}")


def _ends(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [torch.load(path) for path in sorted(folder.glob("end-*"))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("native") / "run"
    run(folder, native, size=SIZE)
    return _ends(folder)[0]


@pytest.mark.parametrize("small", [buffers.SMALL, 0], ids=["as one message", "by DDP's own"])
@pytest.mark.parametrize("kills", [[], [(0, 0, 3, "in forward")]], ids=["calm", "rank 0 is lost"])
def test_they_are_what_ddp_would_have_made_of_them(
    kills: list[Any], small: int, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    run(tmp_path / "run", protected, size=SIZE, kills=kills, small=small)
    first, second = _ends(tmp_path / "run")
    own = {"own": torch.zeros(1)}  # it belongs to its rank alone, and is lost with it
    assert same(plain | own, first | own)
    assert same(first | own, second | own)
    assert kills or not same(first, second)
