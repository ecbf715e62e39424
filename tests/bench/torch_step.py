"""What protection costs while nothing fails: the same DDP step with and without it, in turns.

Both models live in the same processes and take turns step by step, so that whatever else the
machine does hits both alike. The plain one runs over torch's own gloo group.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.guard import Guard
from tests.bench.rows import Row, ms
from tests.integration.torch_world import World

WORLD, WARM_UP, STEPS = 2, 5, 60
WIDTH, DEPTH, BATCH = 1664, 4, 64


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(Path(folder)))
        told = [json.loads((Path(folder) / f"times-{rank}").read_text()) for rank in range(WORLD)]
    plain = statistics.median(told[0]["plain"])
    ours = statistics.median(told[0]["protected"])
    # Neighbouring steps see the same machine: the median of their differences is steadier than the
    # difference of the medians.
    pairs = zip(told[0]["protected"], told[0]["plain"], strict=True)
    extra = statistics.median(a - b for a, b in pairs)
    guard = statistics.median(told[0]["guard"])
    size = told[0]["parameters"] / 1e6
    cost = (plain + extra) / plain
    return [
        Row(
            f"a DDP step of {size:.0f}M parameters on {WORLD} ranks, protected or plain",
            f"{(plain + extra) * 1e3:.2f} ms (median of {STEPS} neighbouring pairs)",
            f"{plain * 1e3:.2f} ms",
            cost,
            target=1.01,
        ),
        Row(
            "the same as a ratio of the two medians",
            ms(told[0]["protected"]),
            ms(told[0]["plain"]),
            ours / plain,
        ),
        Row(
            "processor time of the same steps, which other load on the machine does not stretch",
            ms(told[0]["protected cpu"]),
            ms(told[0]["plain cpu"]),
            statistics.median(told[0]["protected cpu"]) / statistics.median(told[0]["plain cpu"]),
        ),
        Row(
            "the same step when the replicas compare their state in it, against one without",
            f"{(plain + guard) * 1e3:.2f} ms",
            f"{plain * 1e3:.2f} ms",
            (plain + guard) / plain,
        ),
        Row(
            "memory that protection adds to a rank, against all that it holds",
            f"{told[0]['added_mb']:.1f} MB",
            f"{told[0]['peak_mb']:.0f} MB",
            told[0]["added_mb"] / told[0]["peak_mb"],
            target=0.02,
        ),
    ]


async def _run(folder: Path) -> None:
    world = World(script, folder, size=WORLD, run_s=600.0)
    try:
        await world.run()
    finally:
        await world.stop()


def _build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def script(told: dict[str, Any]) -> None:
    job = taskd.init()
    data = torch.randn(BATCH, WIDTH)
    plain = DDP(_build(), process_group=dist.new_group(backend="gloo"))
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    model = DDP(_build())
    optimizer = torch.optim.AdamW(model.parameters())
    before = _resident_mb()
    job.protect(model=model, optimizer=optimizer)
    added = _resident_mb() - before

    def work(one: nn.Module, its: torch.optim.Optimizer) -> None:
        its.zero_grad()
        torch.autograd.backward(one(data).square().mean())
        its.step()

    def timed(run: Callable[[], None]) -> tuple[float, float]:
        dist.barrier()
        begun, used = perf_counter(), process_time()
        run()
        return perf_counter() - begun, process_time() - used

    times: dict[str, list[float]] = {
        "plain": [],
        "protected": [],
        "plain cpu": [],
        "protected cpu": [],
        "guard": [],
    }
    assert job._kept is not None
    guard = Guard(1, "", job._kept, job._groups)
    steps = job.steps(WARM_UP + STEPS)

    def protected() -> None:
        with next(steps):
            work(model, optimizer)

    def compare() -> None:
        guard.compare(0)

    for number in range(WARM_UP + STEPS):
        turns = [
            ("plain", lambda: work(plain, plain_optimizer)),
            ("protected", protected),
        ]
        for name, turn in turns if number % 2 else turns[::-1]:
            took, used = timed(turn)
            if number >= WARM_UP:
                times[name].append(took)
                times[f"{name} cpu"].append(used)
        took, _ = timed(compare)
        times["guard"].append(took)
    for _ in steps:
        raise AssertionError("all steps were done")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size = sum(p.numel() for p in model.parameters())
    end = {**times, "parameters": size, "added_mb": max(0.0, added), "peak_mb": peak}
    (Path(told["folder"]) / f"times-{told['rank']}").write_text(json.dumps(end))


def _resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)
