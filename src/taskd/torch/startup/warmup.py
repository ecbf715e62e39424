"""Warms a standby up: the first moments of a replacement, run without any peer.

A forked process pays for its first connection, model, backward pass and update with page faults,
lazy imports and set-up inside gRPC and torch: half of the processor time that it takes to the end
of its first step. A standby (`agent/zygote/zygote.py`) has paid before it is needed. Nothing of it
remains: groups and threads are gone, and random numbers are seeded again when the process becomes
a rank.
"""

from __future__ import annotations

import gc
import importlib
import logging
import socket
import sys
from datetime import timedelta
from glob import glob
from pathlib import Path
from types import CodeType

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taskd import config
from taskd.bus.endpoint import Bus, BusConfig
from taskd.errors import TaskdError
from taskd.model.ids import manager, worker
from taskd.model.messages import RequestHello
from taskd.runtime.loop_thread import LoopThread
from taskd.torch import compat
from taskd.torch.context import JobContext
from taskd.torch.groups import ddp_buckets, resilient_group
from taskd.torch.groups.all_groups import Groups
from taskd.torch.job import Job
from taskd.torch.loop import carried_names
from taskd.torch.operations.device_tests import StressSettings
from taskd.worker import visible_devices
from taskd.worker.settings import ProfilingSettings, WorkerSettings

log = logging.getLogger(__name__)

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")
"""CUDA on Linux, ROCm, CUDA under Windows."""
JOB, WORLD_SIZE = "warmup", 2
LOOPBACK = "127.0.0.1"
JOIN_S = 5.0
COMPILER = (
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.distributed",
    "torch.utils.cpp_extension",
    "torch.export._trace",
)
"""The largest modules that torch.compile imports when it is first used."""


SETTINGS = (WorkerSettings, StressSettings, ProfilingSettings)
"""What every rank reads."""

_devices_at_start: visible_devices.Devices | None = None
"""What this process saw when it started the driver; None: it did not."""


def run() -> None:
    """Errors are only logged: they would occur again, and be reported, in the real start."""
    thread = LoopThread("taskd-warmup")
    try:
        compat.check_once()
        for kind in SETTINGS:
            config.type_hints(kind)
        socket.getaddrinfo(LOOPBACK, 0)  # the first lookup loads the codec of host names
        thread.run(_exchange_message()).result()
        if not _has_devices():
            train()
        _look_up_host_name()
    except (OSError, RuntimeError, TaskdError) as error:
        log.info("warm-up was not completed: %s", error)
    finally:
        thread.stop()
        gc.collect()  # gRPC's threads end with its last object


def read_script(code: CodeType) -> None:
    """What a rank finds out about the code of its loop takes it 10 ms."""
    carried_names.learn(code)


def import_compiler() -> None:
    """What the first use of torch.compile imports and sets up."""
    compat.compile_in_process()
    try:
        for name in COMPILER:
            importlib.import_module(name)
        if torch.accelerator.current_accelerator() is None:
            compat.trace_and_forget()
    except (ImportError, RuntimeError) as error:
        log.info("warm-up of torch.compile was not completed: %s", error)
    gc.collect()


async def _exchange_message() -> None:
    """A manager and a worker of no real job exchange a message."""
    upstream = Bus(BusConfig(me=manager(), listen=f"{LOOPBACK}:0", job=JOB))
    await upstream.start()
    try:
        address = f"{LOOPBACK}:{upstream.port}"
        downstream = Bus(BusConfig(me=worker(0, 0), upstream=address, job=JOB))
        await downstream.start()
        try:
            if await downstream.join(JOIN_S):
                await downstream.send(manager(), RequestHello())
        finally:
            await downstream.close()
    finally:
        await upstream.close()


def start_driver(reports: list[Path]) -> bool:
    """Start the device's driver if the ranks' reports allow it. True: there is no more to do.

    It takes 0.2 s, which a replacement would otherwise spend in its first update. A training step
    can follow, too: autograd counts the devices, which starts the driver.
    """
    global _devices_at_start
    if not _has_devices():
        return True
    allowed = visible_devices.may_start_driver(reports, config.environ) if reports else None
    if allowed:
        _devices_at_start = visible_devices.seen(config.environ)
        torch.cuda.is_available()
        device = visible_devices.common_device(reports, config.environ)
        try:
            train()
            if device is not None and config.load(WorkerSettings).warm_device:
                use_device(device)
        except (RuntimeError, TaskdError) as error:
            log.info("warm-up was not completed: %s", error)
    return allowed is not None


def use_device(device: int) -> None:
    """What a process does on a device before its first step: context, libraries, kernels.

    It draws no random numbers there, and leaves no memory reserved but that of the context.
    """
    with torch.cuda.device(device):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
        for precision in (torch.float32, torch.bfloat16):
            with torch.autocast("cuda", precision, enabled=precision != torch.float32):
                loss = model(torch.ones(4, 8, device="cuda")).float().square().mean()
            torch.autograd.backward(loss)
            update(optimizer)
        loss.item()
        del model, optimizer, update, loss
        gc.collect()
        torch.cuda.empty_cache()


def driver_has_other_devices() -> bool:
    """Whether the environment has changed since `start_driver`: the driver does not notice."""
    return _devices_at_start not in (None, visible_devices.seen(config.environ))


def _has_devices() -> bool:
    """Without starting a driver. A build for CUDA may be installed on a machine without devices."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    return accelerator.type != "cuda" or any(glob(pattern) for pattern in DEVICE_FILES)


def _look_up_host_name() -> None:
    """A process's first connection to a store makes torch look up the name of its host.

    Without a reachable DNS server that takes 5 s and more, which a repair would wait for.
    """
    dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def train() -> None:
    """A protected step of a small model, in groups that hold only this process."""
    torch.default_generator.manual_seed(0)  # those of devices stay as they are
    context = JobContext(WorkerSettings(), rank=0, world_size=WORLD_SIZE)
    groups = context.groups
    resilient_group.register(groups, {"cpu": "gloo"})
    timeout, excepthook = timedelta(minutes=1), sys.excepthook
    dist.init_process_group(
        resilient_group.BACKEND, store=groups.store, rank=0, world_size=WORLD_SIZE, timeout=timeout
    )
    try:
        _train_steps(Job(context), groups)
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook  # torch's own would show this rank's number forever


def _train_steps(job: Job, groups: Groups) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    # The hooks behind every update belong to the rank that this process becomes.
    update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]
    job.protect(model=model, optimizer=optimizer)
    ddp_buckets.rebuild_early(model, groups)
    for step in job.steps(2):
        with step:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.arange(4))
            torch.autograd.backward(loss)
            update(optimizer)
