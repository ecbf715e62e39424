"""A replacement's first moments, played through with nobody else on the stage.

A forked process pays for its first connection, model, backward pass and update with page faults,
lazy imports and set-up inside gRPC and torch: half of the processor time that it takes to the end
of its first step. The understudy (`agent/zygote/zygote.py`) has paid before it is needed. Nothing
of it stays: groups and threads are gone, and random numbers are seeded anew when the process gets
its part.
"""

from __future__ import annotations

import gc
import logging
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taskd.bus.endpoint import Bus, BusConfig
from taskd.errors import TaskdError
from taskd.model.ids import manager, worker
from taskd.model.messages import RequestHello
from taskd.runtime.loop_thread import LoopThread
from taskd.torch.groups import ddp_buckets as buckets
from taskd.torch.groups import resilient_group as group
from taskd.torch.job import Job
from taskd.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

JOB, WORLD = "rehearsal", 2
LOOPBACK = "127.0.0.1"
JOIN_S = 5.0


def run() -> None:
    """Whatever goes wrong here would go wrong again, and be told, when it counts."""
    line = LoopThread("taskd-rehearsal")
    try:
        socket.getaddrinfo(LOOPBACK, 0)  # the first name of a host loads how names are written
        line.run(_talk()).result()
        _train()
    except (OSError, RuntimeError, TaskdError) as error:
        log.info("the rehearsal was cut short: %s", error)
    finally:
        line.stop()
        gc.collect()  # gRPC's threads end with the last object of it


async def _talk() -> None:
    """A manager and a worker of nobody's job exchange a word."""
    here = Bus(BusConfig(me=manager(), listen=f"{LOOPBACK}:0", job=JOB))
    await here.start()
    try:
        there = Bus(BusConfig(me=worker(0, 0), upstream=f"{LOOPBACK}:{here.port}", job=JOB))
        await there.start()
        try:
            if await there.join(JOIN_S):
                await there.send(manager(), RequestHello())
        finally:
            await there.close()
    finally:
        await here.close()


def _train() -> None:
    if torch.accelerator.current_accelerator() is not None:
        # Autograd would count the devices, before anybody has said which of them are visible.
        return
    torch.manual_seed(0)
    job = Job(WorkerSettings(), rank=0, world_size=WORLD)
    groups = job._groups
    group.register(groups, {"cpu": "gloo"})
    patience, uncaught = timedelta(minutes=1), sys.excepthook
    dist.init_process_group(
        group.BACKEND, store=groups.store, rank=0, world_size=WORLD, timeout=patience
    )
    try:
        _step(job)
    finally:
        dist.destroy_process_group()
        sys.excepthook = uncaught  # torch's own would name this rank for good


def _step(job: Job) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    # The hooks behind every update belong to the rank that this process becomes.
    update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    job.protect(model=model, optimizer=optimizer)
    buckets.settle(model, job._groups)
    for step in job.steps(2):
        with step:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4))
            torch.autograd.backward(loss)
            update(optimizer)
