"""On a GPU: speed of snapshots, their cost per step, and the time to recover a rank.

Needs CUDA; without it, `make bench` keeps the section of the last run.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.copies.snapshots import Snapshots
from taskd.torch.state.protected import Protected
from tests.bench.plain_group import new_plain_group
from tests.bench.rows import Row, ms
from tests.gpu.test_recovery import run
from tests.integration.torch.world import Script, World

WIDTH, DEPTH, BATCH = 8192, 16, 16384
"""1.07 billion parameters; a step takes longer than a copy of them."""
ROUNDS, PAIRS, RECOVERIES = 8, 12, 3
STRETCH, SHORT_STRETCH, STRETCHES = 40, 10, 8
"""Protected and plain steps: so many at a time, so that the host may run ahead."""
GLOO_S, NCCL_S = 0.5, 0.6
STEP_S = 0.1
"""A fault hits a job that has trained for some seconds: its standby is ready."""
NOTES = """
Between two steps the host ends one and begins the next. Meanwhile the device makes the update, and
has nothing else to do: in a step of 134M parameters the update takes longer than the host, in one
of 17M parameters it does not.
"""


def measure() -> list[Row]:
    os.environ.setdefault("TASKD_SEAL", "key of the benchmark")
    rows = _snapshots()
    torch.cuda.empty_cache()
    shapes = (
        *((1, 2048, 4, 8192), (1, 2048, 4, 65536), (1, 4096, 8, 16384)),
        *((2, 2048, 4, 8192), (2, 4096, 8, 16384, SHORT_STRETCH)),
    )
    protection = [_protection(*shape) for shape in shapes]
    recoveries = [_recovery("gloo", 4, GLOO_S), _recovery("nccl", 2, NCCL_S)]
    return [*rows, _automatic_copies(), *protection, *recoveries]


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


def _protection(ranks: int, width: int, depth: int, batch: int, length: int = STRETCH) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        shape = width, depth, batch
        asyncio.run(_train(Path(folder), ranks, {"shape": shape, "length": length}))
        took = json.loads((Path(folder) / "took").read_text())
    who = "one rank" if ranks == 1 else f"{ranks} ranks that share the device"
    return _compared(
        f"a DDP step of {depth * (width + 1) * width / 1e6:.0f}M parameters over nccl, protected "
        f"or plain; {who}, {length} steps at a time",
        took,
        1.02,
    )


def _automatic_copies() -> Row:
    """FSDP2 with one rank: the only holder of its state, which must therefore be copied."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        asyncio.run(_train(Path(folder), 1, {}, sharded_stretches))
        took = json.loads((Path(folder) / "took").read_text())
    return _compared(
        f"a step of {DEPTH * (WIDTH + 1) * WIDTH / 1e9:.2f} billion parameters (FSDP2) with "
        f"automatic copies, which chose every {took['every']} steps; newest copy "
        f"{took['age']} steps old",
        took,
        1.05,
    )


def _compared(what: str, took: dict[str, Any], target: float) -> Row:
    ratios = [ours / plain for ours, plain in zip(took["ours"], took["plain"], strict=True)]
    return Row(what, ms(took["ours"]), ms(took["plain"]), median(ratios), target)


async def _train(
    folder: Path, ranks: int, args: dict[str, Any], script: Script | None = None
) -> None:
    world = World(script or stretches, folder, size=ranks, args=args, run_s=300.0)
    try:
        await world.run()
    finally:
        await world.stop()


def stretches(args: dict[str, Any]) -> None:
    """Inside a rank: run both kinds in turn, and write the times of their steps."""
    os.environ |= {"NCCL_HOSTID": f"host-{args['rank']}", "NCCL_SOCKET_IFNAME": "lo"}
    job = taskd.init("nccl")
    width, depth, size = args["shape"]
    plain = _ddp(width, depth, size, new_plain_group("nccl"))
    took = _alternate(plain, _protected(job, _ddp(width, depth, size, None, job)), args["length"])
    if args["rank"] == 0:
        (Path(args["folder"]) / "took").write_text(json.dumps(took))
    dist.barrier()


def sharded_stretches(args: dict[str, Any]) -> None:
    """The same with FSDP2. Each stretch has copies in it."""
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo"}
    job = taskd.init("nccl")
    ours = _protected(job, _fsdp(init_device_mesh("cuda", (1,)), job))
    plain = _fsdp(DeviceMesh.from_group(new_plain_group("nccl"), "cuda"))
    for _ in range(STRETCH):
        ours()  # the first copies reserve their memory; then the interval is chosen
    took = _alternate(plain, ours, STRETCH)
    copies = job._context.copies
    newest = max(copy.step for copy in copies.list_on_node())
    found = {**took, "every": copies.every, "age": job.step - newest}
    (Path(args["folder"]) / "took").write_text(json.dumps(found))


def _protected(job: taskd.Job, work: Callable[[], None]) -> Callable[[], None]:
    """One step at a time, in one loop."""

    def steps() -> Iterator[None]:
        for step in job.steps(1_000_000):
            for attempt in step:
                with attempt:
                    work()
            yield

    return partial(next, steps())


def _alternate(
    plain: Callable[[], None], ours: Callable[[], None], length: int
) -> dict[str, list[float]]:
    """Seconds per step, in stretches of so many steps. The first stretches connect."""
    took: dict[str, list[float]] = {"plain": [], "ours": []}
    for number in range(STRETCHES + 1):
        for kind, step in (("plain", plain), ("ours", ours)):
            dist.barrier()

            def stretch(step: Callable[[], None] = step) -> None:
                for _ in range(length):
                    step()

            if (seconds := _timed(stretch)) and number:
                took[kind].append(seconds / length)
    return took


def _fsdp(mesh: DeviceMesh, job: taskd.Job | None = None) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(DEPTH)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _step_of(model, BATCH, WIDTH, job)


def _ddp(
    width: int,
    depth: int,
    size: int,
    group: dist.ProcessGroup | None,
    job: taskd.Job | None = None,
) -> Callable[[], None]:
    layers = [nn.Linear(width, width, device="cuda") for _ in range(depth)]
    return _step_of(DDP(nn.Sequential(*layers), process_group=group), size, width, job)


def _step_of(model: nn.Module, size: int, width: int, job: taskd.Job | None) -> Callable[[], None]:
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


def _recovery(backend: str, ranks: int, limit_s: float) -> Row:
    found = []
    for _ in range(RECOVERIES):
        log = run("ddp", backend, "1 50 killed", STEP_S=str(STEP_S)).err
        match = re.search(r"recover-in-place: (recovered in (\d+) ms \(.*)", log)
        assert match is not None, log
        found.append((int(match[2]), match[1]))
    middle = sorted(found)[RECOVERIES // 2]
    what = f"SIGKILL of one of {ranks} ranks on one device over {backend} to its next step, in s"
    return Row(what, f"{middle[1]} (median of {RECOVERIES})", "", middle[0] / 1000, limit_s)
