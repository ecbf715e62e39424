"""The job for launchers that restart processes: it saves and loads its own checkpoint.

Run by torchrun, by NVIDIA's ft_launcher, by dlrover-run, and by `taskd run` as the unmodified
script.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.bench.peers.workload import (
    STEPS,
    StepWriter,
    build_model,
    build_optimizer,
    train_step,
)

SAVE_EVERY = 5
CHECKPOINT = Path("checkpoint.pt")
"""In the working directory, which is the trial's own folder."""


def train(keep: list[DDP]) -> None:
    """Train from the newest checkpoint on, in the current process group.

    `keep` holds what must not be destroyed when this returns: see survivors.py for the deadlock in
    the destructor of gloo, which only a second call in one process can cause.
    """
    rank = dist.get_rank()
    log = StepWriter()
    model = build_model()
    optimizer = build_optimizer(model)
    first = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"] + 1
    ddp = DDP(model)
    keep.append(ddp)
    for step in range(first, STEPS):
        train_step(ddp, optimizer, step, rank)
        log.done(rank, step)
        if rank == 0 and step % SAVE_EVERY == 0:
            save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def save(state: dict[str, object]) -> None:
    """Rename at the end: a rank that dies while it writes must not leave half a checkpoint."""
    unfinished = CHECKPOINT.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, CHECKPOINT)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([])
