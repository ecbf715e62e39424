"""What protection costs while nothing fails: the same DDP step with and without it, in turns.

Both models live in the same processes and take turns step by step, the order changing, so that
whatever else the machine does hits both alike. The plain one runs over torch's own gloo group.

A step that something else has slowed down says nothing about protection. So the pairs are taken in
blocks; of a block the fastest steps of either kind count, and give one ratio. The median of
these ratios is told, with the interval in which it lies with 95 % certainty. The processor time
of the same steps is told beside it: other load stretches it far less.

Peak memory needs processes that have only one of the two: each kind also runs by itself, and the
plain one without anything of ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import floor, sqrt
from pathlib import Path
from statistics import fmean, median
from time import monotonic, perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.bench.rows import Row
from tests.integration.torch_world import World

WORLD, WARM_UP = 2, 5
WIDTH, DEPTH, BATCH = 1664, 4, 16
BLOCK, BLOCKS, FASTEST = 10, 60, 4
"""Pairs a block, blocks, and how many steps of each kind count in a block."""
BUDGET_S = 110.0
"""On a busy machine there are fewer blocks, not more minutes."""
STEPS_ALONE, RUNS_ALONE = 12, 3

Turns = list[tuple[float, float]]
"""For each step: wall time and processor time, in seconds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, and between which bounds it lies."""

    middle: float
    low: float
    high: float
    size: int

    def __str__(self) -> str:
        return f"{self.middle:.4f}, 95 %: {self.low:.4f} to {self.high:.4f}"


def measure() -> list[Row]:
    told = _run("pairs")
    plain, ours = ([_blocks(told[kind], clock) for clock in (0, 1)] for kind in ("plain", "ours"))
    (wall, own_wall), (cpu, own_cpu) = (
        (
            estimate([a / b for a, b in zip(ours[clock], plain[clock], strict=True)]),
            median(a - b for a, b in zip(ours[clock], plain[clock], strict=True)),
        )
        for clock in (0, 1)
    )
    size = told["parameters"] / 1e6
    runs = [{kind: _run(kind) for kind in ("plain", "ours")} for _ in range(RUNS_ALONE)]
    return [
        Row(
            f"a DDP step of {size:.0f}M parameters on {WORLD} ranks, protected or plain",
            f"{own_wall * 1e6:+.0f} µs ({wall}; {wall.size} blocks of {BLOCK} pairs)",
            f"{median(plain[0]) * 1e3:.2f} ms",
            wall.middle,
            target=1.01,
        ),
        Row(
            "processor time of the same steps, all threads",
            f"{own_cpu * 1e6:+.0f} µs ({cpu})",
            f"{median(plain[1]) * 1e3:.2f} ms",
            cpu.middle,
        ),
        _memory("peak memory of its own of such a rank, protected or plain", "own_mb", runs, 1.02),
        _memory(
            "the same with pages of programs and libraries, which a node has once for all ranks",
            "peak_mb",
            runs,
        ),
    ]


def _memory(
    what: str, which: str, runs: list[dict[str, dict[str, float]]], target: float | None = None
) -> Row:
    ours, plain = (median(run[kind][which] for run in runs) for kind in ("ours", "plain"))
    told = f"{ours:.0f} MB (median of {RUNS_ALONE} runs)"
    return Row(what, told, f"{plain:.0f} MB", ours / plain, target)


def estimate(values: list[float]) -> Estimate:
    """The median with the bounds that order alone gives: no shape of the noise is assumed."""
    ordered, half = sorted(values), len(values) / 2
    reach = 0.98 * sqrt(len(values))
    low, high = max(0, floor(half - reach)), min(len(values) - 1, floor(half + reach))
    return Estimate(median(ordered), ordered[low], ordered[high], len(values))


def _blocks(turns: Turns, clock: int) -> list[float]:
    """One time for each block: the mean of its fastest steps."""
    times = [turn[clock] for turn in turns]
    blocks = (times[at : at + BLOCK] for at in range(0, len(times), BLOCK))
    return [fmean(sorted(block)[:FASTEST]) for block in blocks]


def _run(kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play(kind, Path(folder)))
        told: dict[str, Any] = json.loads((Path(folder) / "told").read_text())
    return told


async def _play(kind: str, folder: Path) -> None:
    script = pairs if kind == "pairs" else alone
    world = World(script, folder, size=WORLD, told={"kind": kind}, run_s=600.0)
    try:
        await world.run()
    finally:
        await world.stop()


# Inside a rank


def _build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def _plain(group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    model = DDP(_build(), process_group=group)
    return _worker(model, torch.optim.AdamW(model.parameters(), fused=True))


def _protected(job: taskd.Job) -> Callable[[], None]:
    model = DDP(_build())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    job.protect(model=model, optimizer=optimizer)
    steps, work = job.steps(1_000_000), _worker(model, optimizer)

    def turn() -> None:
        with next(steps):
            work()

    return turn


def _worker(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    data = torch.randn(BATCH, WIDTH)

    def work() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(data).square().mean())
        optimizer.step()

    return work


def pairs(told: dict[str, Any]) -> None:
    job = taskd.init()
    kinds = {"plain": _plain(dist.new_group(backend="gloo")), "ours": _protected(job)}
    turns: dict[str, Turns] = {kind: [] for kind in kinds}

    def pair(number: int) -> None:
        for kind in list(kinds)[:: 1 if number % 2 else -1]:
            dist.barrier()
            begun, used = perf_counter(), process_time()
            kinds[kind]()
            turns[kind].append((perf_counter() - begun, process_time() - used))

    for number in range(WARM_UP):
        pair(number)
    for kind in kinds:
        turns[kind].clear()
    deadline = monotonic() + BUDGET_S
    for _ in range(BLOCKS):
        for number in range(BLOCK):
            pair(number)
        over = torch.tensor([monotonic() > deadline])
        dist.broadcast(over, src=0)
        if over:
            break
    size = sum(parameter.numel() for parameter in _build().parameters())
    _tell(told, {**turns, "parameters": size})


def alone(told: dict[str, Any]) -> None:
    """As many steps as it takes until memory does not grow any more, of one kind only."""
    if told["kind"] == "plain":
        host, _, port = os.environ["TASKD_STORE"].partition(":")
        store = TCPStore(host, int(port), is_master=False)
        dist.init_process_group("gloo", store=store, rank=told["rank"], world_size=WORLD)
        work = _plain()
    else:
        work = _protected(taskd.init())
    for _ in range(STEPS_ALONE):
        work()
    lines = Path("/proc/self/status").read_text().splitlines()
    told_of = dict(line.split(":", 1) for line in lines)
    kb = {name: int(told_of[name].split()[0]) for name in ("VmHWM", "RssFile")}
    dist.barrier()
    _tell(told, {"peak_mb": kb["VmHWM"] / 1024, "own_mb": (kb["VmHWM"] - kb["RssFile"]) / 1024})


def _tell(told: dict[str, Any], result: dict[str, Any]) -> None:
    if told["rank"] == 0:
        (Path(told["folder"]) / "told").write_text(json.dumps(result))
