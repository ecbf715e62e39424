"""Gradients that are accumulated across steps cannot be given to a replacement: a warning."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import ends, run
from tests.integration.torch.scripts import CLASSES, WIDTH, seed


def accumulate(args: dict[str, Any]) -> None:
    logging.basicConfig(filename=Path(args["folder"]) / f"log-{args['rank']}", force=True)
    seed(1234)
    job = taskd.init()
    model = DDP(nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(6):
        with step:
            torch.autograd.backward(model(torch.rand(4, WIDTH)).sum())
            if int(step) % args["every"] == args["every"] - 1:
                optimizer.step()
                optimizer.zero_grad()
    torch.save({}, Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.mark.parametrize(("every", "warnings"), [(1, 0), (3, 1)])
def test_step_that_leaves_gradients_is_warned_about_once(
    tmp_path: Path, every: int, warnings: int
) -> None:
    ends(run(tmp_path / "run", accumulate, size=2, ranks_per_node=2, every=every))
    for rank in range(2):
        log = (tmp_path / "run" / f"log-{rank}").read_text()
        assert log.count("left gradients for the next step") == warnings
