"""On a GPU: speed of snapshots, their cost per step, and the time to recover a rank.

Needs CUDA; without it, `make bench` keeps the section of the last run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.copies.snapshots import Snapshots
from taskd.torch.state.protected import Protected
from tests.bench.rows import Row, ms
from tests.gpu.test_recovery import run
from tests.integration.torch.world import World

WIDTH, DEPTH, BATCH = 8192, 16, 16384
"""1.07 billion parameters; a step takes longer than a copy of them."""
ROUNDS, PAIRS, RECOVERIES = 8, 12, 3
STRETCH, STRETCHES = 10, 8
"""Protected and plain steps: ten at a time, so that the host may run ahead."""


def measure() -> list[Row]:
    rows = _snapshots()
    torch.cuda.empty_cache()
    alone, shared = _protection(1, 2048, 4, 8192), _protection(2, 2048, 4, 8192)
    return [*rows, alone, shared, _recovery("gloo", 4), _recovery("nccl", 2)]


def _snapshots() -> list[Row]:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    batch = torch.randn(BATCH, WIDTH, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(batch).float().square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    parameters = sum(one.numel() for one in net.parameters())
    size = 12 * parameters
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        kept = Protected(net, optimizer, None, {})
        snapshots = Snapshots(Path(folder), 0, "", kept)
        number = iter(range(1_000_000))

        def copy() -> None:
            snapshots.start(next(number), 0)
            snapshots.wait()

        first = [_timed(copy) for _ in range(2)]
        took = [_timed(copy) for _ in range(ROUNDS)]
        limit = _limit(size)
        # As in a job: the copy starts after the update and must be done before the next one.
        optimizer.register_step_pre_hook(lambda *_: snapshots.wait())

        def copied() -> None:
            step()
            snapshots.start(next(number), 0)

        plain, with_copies = _in_turns(step, copied, snapshots.wait)
    return [
        Row(
            f"copy of {size / 1e9:.1f} GB of state from the device to shared memory, checksums "
            "included, against one plain copy to pinned memory (bytes per second)",
            f"{size / median(took) / 1e9:.1f} GB/s (median of {ROUNDS})",
            f"{size / median(limit) / 1e9:.1f} GB/s",
            median(limit) / median(took),
            target=0.8,
            at_least=True,
        ),
        Row(
            "the first copy into each of the two files, which reserves and pins them", ms(first), ""
        ),
        Row(
            f"a step of {parameters / 1e9:.2f} billion parameters, each with a copy or without",
            ms(with_copies),
            ms(plain),
            median(with_copies) / median(plain),
        ),
    ]


def _limit(size: int) -> list[float]:
    there = torch.empty(size, dtype=torch.uint8, device="cuda")
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return [_timed(lambda: here.copy_(there, non_blocking=True)) for _ in range(ROUNDS)]


def _in_turns(
    one: Callable[[], None], other: Callable[[], None], between: Callable[[], None]
) -> tuple[list[float], list[float]]:
    """Times of both, in blocks of three steps. The first step of a block is not counted: it may
    still wait for work of the other kind."""
    times: tuple[list[float], list[float]] = [], []
    for _ in range(PAIRS):
        for run_one, its in zip((one, other), times, strict=True):
            run_one()
            torch.cuda.synchronize()
            begun = perf_counter()
            run_one()
            run_one()
            torch.cuda.synchronize()
            its.append((perf_counter() - begun) / 2)
            between()
    return times


def _timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = perf_counter()
    work()
    torch.cuda.synchronize()
    return perf_counter() - begun


def _protection(ranks: int, width: int, depth: int, batch: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_train(Path(folder), ranks, {"shape": (width, depth, batch)}))
        took = json.loads((Path(folder) / "took").read_text())
    who = "one rank" if ranks == 1 else f"{ranks} ranks that share the device"
    return Row(
        f"a DDP step of {depth * (width + 1) * width / 1e6:.0f}M parameters over nccl, protected "
        f"or plain; {who}, {STRETCH} steps at a time",
        ms(took["ours"]),
        ms(took["plain"]),
        median(ours / plain for ours, plain in zip(took["ours"], took["plain"], strict=True)),
    )


async def _train(folder: Path, ranks: int, args: dict[str, Any]) -> None:
    world = World(stretches, folder, size=ranks, args=args, run_s=300.0)
    try:
        await world.run()
    finally:
        await world.stop()


def stretches(args: dict[str, Any]) -> None:
    """Inside a rank: run both kinds in turn, and write the times of their steps."""
    os.environ |= {"NCCL_HOSTID": f"host-{args['rank']}", "NCCL_SOCKET_IFNAME": "lo"}
    job = taskd.init("nccl")
    width, depth, size = args["shape"]
    plain = _ddp(width, depth, size, dist.new_group(backend="nccl"))
    work = _ddp(width, depth, size, None, job)
    steps = job.steps(1_000_000)

    def ours() -> None:
        with next(steps):
            work()

    took: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(STRETCHES + 1):
        for kind, step in (("plain", plain), ("ours", ours)):
            dist.barrier()

            def stretch(step: Callable[[], None] = step) -> None:
                for _ in range(STRETCH):
                    step()

            if (seconds := _timed(stretch)) and number:  # the first stretch connects
                took[kind].append(seconds / STRETCH)
    if args["rank"] == 0:
        (Path(args["folder"]) / "took").write_text(json.dumps(took))
    dist.barrier()


def _ddp(
    width: int,
    depth: int,
    size: int,
    group: dist.ProcessGroup | None,
    job: taskd.Job | None = None,
) -> Callable[[], None]:
    layers = [nn.Linear(width, width, device="cuda") for _ in range(depth)]
    model = DDP(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(size, width, device="cuda")
    if job is not None:
        job.protect(model=model, optimizer=optimizer)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch).float().square().mean()
        torch.autograd.backward(loss)
        optimizer.step()

    return step


def _recovery(backend: str, ranks: int) -> Row:
    found = []
    for _ in range(RECOVERIES):
        log = run("ddp", backend, "1 20 killed").err
        match = re.search(r"recover-in-place: (recovered in (\d+) ms.*)", log)
        assert match is not None, log
        found.append((int(match[2]), match[1]))
    middle = sorted(found)[RECOVERIES // 2]
    what = f"SIGKILL of one of {ranks} ranks on one device over {backend} to its next step"
    return Row(what, f"{middle[1]} (median of {RECOVERIES})", "")
