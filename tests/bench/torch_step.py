"""The cost of protection while nothing fails: the same DDP step with and without it.

Protected and plain steps alternate, in changing order, so that other load on the machine affects
both equally. Both train the same model, because the addresses of weights, gradients and optimizer
state alone change the speed of a step by some percent. So one model and one optimizer are wrapped
twice: by a DDP over torch's own gloo group, and by a protected one. (The plain step passes our two
hooks in the optimizer, which then do nothing: a few microseconds.)

A step ends when both ranks have finished it: the two kinds wait for the peer in different places,
and all waiting must count. Each pair of steps gives a ratio. The table has the median of the ratios
with its 95 % confidence interval, for a model with buffers, which DDP broadcasts in every step, and
for one without. A third model is so small that its step consists of little more than protection; it
gives that cost in microseconds, far more exactly.

Peak memory needs processes with only one kind, so each kind also runs alone, the plain one without
any part of taskd.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import floor, sqrt
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.bench.plain_group import new_plain_group
from tests.bench.rows import Row
from tests.integration.torch.world import Script, World, join_plain_group

WORLD, WARM_UP = 2, 6
WIDTH, DEPTH, BATCH = 1664, 4, 16
SMALL = 16
"""The width of the model whose step is little more than protection."""
PAIRS, PAIRS_SMALL = 1200, 600
BUDGET_S = 200.0
"""On a busy machine there are fewer pairs; the run does not take longer."""
STEPS_ALONE, RUNS_ALONE = 12, 3

Work = Callable[[], None]
Turns = list[tuple[float, float]]
"""For each step: wall time and processor time, in seconds."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and its confidence interval."""

    middle: float
    low: float
    high: float
    size: int

    def __str__(self) -> str:
        return f"{self.middle:.4f}, 95 %: {self.low:.4f} to {self.high:.4f}"


def measure() -> list[Row]:
    runs = [
        {kind: run_script(alone, kind=kind) for kind in ("plain", "ours")}
        for _ in range(RUNS_ALONE)
    ]
    return [
        *_compared("", run_script(pairs, norm="batch", width=WIDTH, pairs=PAIRS)),
        *_compared(" without buffers", run_script(pairs, norm="layer", width=WIDTH, pairs=PAIRS)),
        _constant(run_script(pairs, norm="layer", width=SMALL, pairs=PAIRS_SMALL)),
        _memory("peak private memory of such a rank, protected or plain", "own_mb", runs, 1.02),
        _memory(
            "the same with the pages of programs and libraries, which all ranks of a node share",
            "peak_mb",
            runs,
        ),
    ]


def _compared(which: str, result: dict[str, Any]) -> Iterator[Row]:
    for clock, what in enumerate(("a DDP step", "CPU time of a DDP step, all threads,")):
        plain, ours = ([turn[clock] for turn in result[kind]] for kind in ("plain", "ours"))
        ratio = estimate([a / b for a, b in zip(ours, plain, strict=True)])
        yield Row(
            f"{what} of {result['parameters'] / 1e6:.0f}M parameters{which} on {WORLD} ranks, "
            "protected or plain",
            f"{(ratio.middle - 1) * median(plain) * 1e6:+.0f} µs ({ratio}; {ratio.size} pairs)",
            f"{median(plain) * 1e3:.2f} ms",
            ratio.middle,
            target=None if clock else 1.01,
        )


def _constant(result: dict[str, Any]) -> Row:
    plain, ours = ([turn[0] for turn in result[kind]] for kind in ("plain", "ours"))
    more = estimate([(a - b) * 1e6 for a, b in zip(ours, plain, strict=True)])
    return Row(
        "the same with a tiny model: what protection adds to every step",
        f"{more.middle:+.0f} µs (95 %: {more.low:.0f} to {more.high:.0f})",
        f"{median(plain) * 1e3:.2f} ms",
    )


def _memory(
    what: str, which: str, runs: list[dict[str, dict[str, float]]], target: float | None = None
) -> Row:
    ours, plain = (median(run[kind][which] for run in runs) for kind in ("ours", "plain"))
    value = f"{ours:.0f} MB (median of {RUNS_ALONE} runs)"
    return Row(what, value, f"{plain:.0f} MB", ours / plain, target)


def estimate(values: list[float]) -> Estimate:
    """The median with an interval from order statistics: no distribution is assumed."""
    ordered, half = sorted(values), len(values) / 2
    reach = 0.98 * sqrt(len(values))
    low, high = max(0, floor(half - reach)), min(len(values) - 1, floor(half + reach))
    return Estimate(median(ordered), ordered[low], ordered[high], len(values))


def run_script(script: Script, world: int = WORLD, **args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_play(script, Path(folder), world, args))
        result: dict[str, Any] = json.loads((Path(folder) / "result").read_text())
    return result


async def _play(script: Script, folder: Path, size: int, args: dict[str, Any]) -> None:
    world = World(script, folder, size=size, args=args, run_s=600.0)
    try:
        await world.run()
    finally:
        await world.stop()


# Inside a rank


def _build(norm: str = "batch", width: int = WIDTH) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers.append(nn.Linear(width, width))
        layers.append(nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _protected(job: taskd.Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Work:
    job.protect(model=model, optimizer=optimizer)
    work = _worker(model, optimizer)

    def turns() -> Iterator[None]:
        for step in job.steps(1_000_000):
            for attempt in step:
                with attempt:
                    work()
            yield

    return partial(next, turns())


def _worker(model: nn.Module, optimizer: torch.optim.Optimizer) -> Work:
    data = torch.randn(BATCH, next(model.parameters()).shape[1])

    def work() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(data).square().mean())
        optimizer.step()

    return work


def pairs(args: dict[str, Any]) -> None:
    job = taskd.init()
    neutral = new_plain_group()
    model = _build(args["norm"], args["width"])
    optimizer = _optimizer(model)
    kinds = {
        "plain": _worker(DDP(model, process_group=new_plain_group()), optimizer),
        "ours": _protected(job, DDP(model), optimizer),
    }
    turns: dict[str, Turns] = {kind: [] for kind in kinds}
    deadline = monotonic() + BUDGET_S
    for number in range(WARM_UP + args["pairs"]):
        over = torch.tensor([monotonic() > deadline])
        dist.broadcast(over, src=0, group=neutral)
        if over:
            break
        for kind in list(kinds)[:: 1 if number % 2 else -1]:
            dist.barrier(neutral)
            begun, used = perf_counter(), process_time()
            kinds[kind]()
            dist.barrier(neutral)
            turns[kind].append((perf_counter() - begun, process_time() - used))
    size = sum(parameter.numel() for parameter in model.parameters())
    _write(args, {kind: those[WARM_UP:] for kind, those in turns.items()} | {"parameters": size})


def alone(args: dict[str, Any]) -> None:
    """Run steps of one kind only, until memory has stopped growing."""
    if args["kind"] == "plain":
        join_plain_group()
        model = DDP(_build())
        work = _worker(model, _optimizer(model))
    else:
        job = taskd.init()
        model = DDP(_build())
        work = _protected(job, model, _optimizer(model))
    for _ in range(STEPS_ALONE):
        work()
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    kb = {name: int(fields[name].split()[0]) for name in ("VmHWM", "RssFile")}
    dist.barrier()
    _write(args, {"peak_mb": kb["VmHWM"] / 1024, "own_mb": (kb["VmHWM"] - kb["RssFile"]) / 1024})


def _write(args: dict[str, Any], result: dict[str, Any]) -> None:
    if args["rank"] == 0:
        (Path(args["folder"]) / "result").write_text(json.dumps(result))
