"""Groups with a backend of their own, as scripts make them beside NCCL or for checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import BATCH, CLASSES, WIDTH, batch, digest, inject_fault, seed

STEPS = 6


def side_groups(args: dict[str, Any]) -> None:
    """All ranks share a gloo group; each half has one more, made before and after the first."""
    seed(1234)
    job = taskd.init()
    everyone = dist.new_group(backend="gloo")
    halves = [dist.new_group([0, 1], backend="gloo"), dist.new_group([2, 3], backend="cpu:gloo")]
    half = halves[job.rank // 2]
    dist.barrier(group=everyone)
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    seen = torch.zeros(2)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            data, target = batch(args["rank"], step)
            assert len(data) == BATCH
            inject_fault(args, step, "in forward")
            loss = nn.functional.cross_entropy(model(data), target)
            torch.autograd.backward(loss)
            seen = loss.detach().repeat(2)
            dist.all_reduce(seen[:1], group=everyone)
            dist.all_reduce(seen[1:], group=half)
            inject_fault(args, step, "after backward")
            optimizer.step()
    end = {**digest(net, optimizer), "seen": seen}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.mark.parametrize("where", ["in forward", "after backward"])
def test_side_groups_survive_a_kill(tmp_path: Path, where: str) -> None:
    plain = ends(run(tmp_path / "plain", side_groups))
    killed = run(tmp_path / "killed", side_groups, kills=[(1, 0, 2, where), (2, 0, 4, where)])
    assert killed.incarnations[1] == killed.incarnations[2] == 1
    for before, after in zip(plain, ends(killed), strict=True):
        assert same(before["model"], after["model"])
        assert torch.equal(before["seen"], after["seen"])
