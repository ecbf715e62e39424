"""Training scripts for the tests, with faults that strike at a chosen moment."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch import sockets

WIDTH, CLASSES, BATCH = 32, 8, 16


def strike(told: dict[str, Any], step: int, moment: str) -> None:
    """Die here, or lose the links to the peers, if the test wants it. Each fault strikes once."""
    here = (told["rank"], told["life"], int(step), moment)
    if here in told.get("kills", ()):
        os.kill(os.getpid(), signal.SIGKILL)
    if here in told.get("cuts", ()):
        told["cuts"] = [cut for cut in told["cuts"] if cut != here]
        for one in sockets.scan():
            if not one.listening and one.peer_port not in told["ports"]:
                sockets.cut(one)


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step * 1000 + rank * 10 + part)
    return (
        torch.randn(BATCH, WIDTH, generator=random),
        torch.randint(CLASSES, (BATCH,), generator=random),
    )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
        "random": torch.get_rng_state(),
    }


def ddp(told: dict[str, Any]) -> None:
    """DDP with dropout over gloo."""
    torch.manual_seed(1234 + told["rank"])
    job = taskd.init()
    net = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, CLASSES)
    )
    model = DDP(net, bucket_cap_mb=0.01)  # many buckets, so that their layout matters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    optimizer.register_step_pre_hook(lambda *_: strike(told, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(lambda *_: strike(told, job.step, "after the optimizer"))
    log = Path(told["folder"]) / f"log-{told['rank']}"
    strike(told, 1, "joining")
    for step in job.steps(told["steps"]):
        strike(told, step, "between steps")
        with step:
            optimizer.zero_grad()
            data, target = batch(told["rank"], step)
            strike(told, step, "in forward")
            output = model(data)
            output.register_hook(lambda g, s=step: strike(told, s, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, target))
            strike(told, step, "after backward")
            optimizer.step()
        if job.step > step:
            with log.open("a") as file:
                file.write(f"{job.step}\n")
    torch.save(digest(net, optimizer), Path(told["folder"]) / f"end-{told['rank']}.pt")
