"""An exception from `retry_on` is raised inside the update: some weights are new, some are old."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.state.sharded import local
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import (
    CLASSES,
    WIDTH,
    Hiccup,
    batch,
    inject_fault,
    raise_hiccup,
)
from tests.integration.torch.world import Script

STEPS = 5


def replicated(args: dict[str, Any]) -> None:
    _train(args, sharded=False)


def sharded(args: dict[str, Any]) -> None:
    _train(args, sharded=True)


def _train(args: dict[str, Any], sharded: bool) -> None:
    torch.manual_seed(7)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    if sharded:
        fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    model = net if sharded else DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer, retry_on=(Hiccup,))

    def update_half(*_: Any) -> None:
        """After the gate: change some weights, and perhaps raise before the rest."""
        before = [local(one).clone() for one in net.parameters()]
        with torch.no_grad():
            local(next(net.parameters())).add_(1.0)
        raise_hiccup(args, job.step, "in the optimizer")
        with torch.no_grad():
            for one, value in zip(net.parameters(), before, strict=True):
                local(one).copy_(value)

    optimizer.register_step_pre_hook(update_half)
    for step in job.steps(args["steps"]):
        with step:
            optimizer.zero_grad()
            data, target = batch(args["rank"], step)
            output = model(data)
            output.register_hook(lambda g, s=step: inject_fault(args, s, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, target))
            optimizer.step()
    end = [local(one).detach().clone() for one in net.parameters()]
    torch.save({"weights": end}, Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.mark.parametrize("script", [replicated, sharded])
def test_half_an_update_does_not_count_as_the_state_before_it(
    script: Script, tmp_path: Path
) -> None:
    calm = ends(run(tmp_path / "calm", script, steps=STEPS))
    world = run(tmp_path / "run", script, steps=STEPS, raises=[(1, 0, 2, "in the optimizer")])
    assert world.incident == 1
    assert sum(world.incarnations.values()) == 0
    assert_same(calm, world)
