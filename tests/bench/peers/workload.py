"""The training job of every contender: an MLP of about a million parameters on random data.

The scripts in train/ import it in the virtual environment of every peer, so it needs only torch.
trial.Trial reads what `StepWriter` writes.
"""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

WORLD = 4
BATCH = 32
FEATURES = 256
CLASSES = 128
STEPS = 1_000_000
"""More than any trial needs: the driver ends the job, not the script."""
STEP_LOG = "BENCH_STEP_LOG"


def build_model() -> nn.Module:
    """The same weights in every process that calls it."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(FEATURES, 1024),
        nn.ReLU(),
        nn.Linear(1024, 640),
        nn.ReLU(),
        nn.Linear(640, CLASSES),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Depends on step and rank only, so that a replayed step gets the same batch."""
    dice = torch.Generator().manual_seed(step * WORLD + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=dice)
    return inputs, torch.randint(CLASSES, (BATCH,), generator=dice)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    inputs, wanted = batch(step, rank)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), wanted)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def warm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Run one step that changes nothing: it creates optimizer state and does all lazy imports."""
    for group in optimizer.param_groups:
        group["lr"], rate = 0.0, group["lr"]
        train_step(model, optimizer, 0, 0)
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


class StepWriter:
    """Reports finished steps to the driver: `<monotonic ns> <rank> <step> <pid> <world size>`."""

    def __init__(self) -> None:
        self._pipe = os.open(os.environ[STEP_LOG], os.O_WRONLY)

    def done(self, rank: int, step: int, world: int = WORLD) -> None:
        line = f"{time.monotonic_ns()} {rank} {step} {os.getpid()} {world}\n"
        os.write(self._pipe, line.encode())  # shorter than PIPE_BUF: lines never mix
