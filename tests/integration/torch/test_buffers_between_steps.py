"""A pass in training mode between two steps changes BatchNorm's statistics: a warning says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import run
from tests.integration.torch.scripts import WIDTH, batch, seed

STEPS = 4


def sampling(args: dict[str, Any]) -> None:
    """Looks at the model after step 1, in training mode if the test wants it."""
    logging.basicConfig(filename=f"{args['folder']}/log-{args['rank']}", force=True)
    seed(1)
    job = taskd.init()
    model: Any = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        data, _ = batch(args["rank"], step)
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                torch.autograd.backward(model(data).mean())
                optimizer.step()
        if step == 1:
            model.train(args["training"])
            with torch.no_grad():
                model(data)
            model.train()


def _warnings(folder: Path) -> list[str]:
    lines = (folder / "log-0").read_text().splitlines()
    return [line for line in lines if "buffers were changed" in line]


def test_a_pass_in_training_mode_is_named_in_the_next_step(tmp_path: Path) -> None:
    run(tmp_path / "run", sampling, size=2, training=True)
    (warning,) = _warnings(tmp_path / "run")
    assert "between steps 1 and 2" in warning
    assert "1.num_batches_tracked" in warning


def test_a_pass_in_evaluation_mode_is_not(tmp_path: Path) -> None:
    run(tmp_path / "run", sampling, size=2, training=False)
    assert _warnings(tmp_path / "run") == []
