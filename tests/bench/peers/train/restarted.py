"""The job as people write it for launchers that restart processes, with a checkpoint of its own.

Run by torchrun, by NVIDIA's ft_launcher, by dlrover-run, and by `taskd run` as the script that
knows nothing of taskd.
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
    """From the newest checkpoint on, in the process group that there is.

    `keep` holds what must not be destroyed when this ends: see survivors.py for the deadlock in
    gloo's destructor, which only those that call it again in one process can meet.
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
    """A rank that dies while it writes must not leave half a checkpoint where others load it."""
    unfinished = CHECKPOINT.with_suffix(".tmp")
    torch.save(state, unfinished)
    os.replace(unfinished, CHECKPOINT)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([])
