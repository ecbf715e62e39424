"""A rank of a DDP job that is recorded in every second stretch of steps; prints both step times.

Run by `tests/bench/profiling.py`. Stretches alternate in one process, so that both see the same
noise; which kind starts alternates, too.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import taskd.torch  # noqa: F401 - adds its hook after the optimizers
from taskd.model.profiling import EVERYTHING, NOTHING
from taskd.torch.profiling import optimizer_hook
from taskd.worker.profiling import profiler

STEPS, STRETCHES = int(sys.argv[1]), int(sys.argv[2])


def own_time(ours: profiler.Profiler) -> float:
    """Return the time that the hooks add to a step with one collective: the minimum of many runs.

    The group has one rank and the model is tiny, so the difference is not lost in the noise.
    """
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = DistributedDataParallel(torch.nn.Linear(8, 8), process_group=groups[dist.get_rank()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer_hook._hook._counted = id(optimizer)
    batch = torch.ones(2, 8)
    shortest: dict[bool, float] = {}
    for number in range(60):
        recorded = bool(number % 2)
        ours.request(EVERYTHING if recorded else NOTHING)
        for measured in (False, True):
            begin = time.perf_counter()
            for _ in range(20 if measured else 2):
                model(batch).sum().backward()
                optimizer.step()
            took = (time.perf_counter() - begin) / 20
            if measured:
                shortest[recorded] = min(took, shortest.get(recorded, took))
    return shortest[True] - shortest[False]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    width = 1280
    layers = [torch.nn.Linear(width, width) for _ in range(7)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))  # 11.5 million parameters
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, width)

    def stretch(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - begin) / steps

    stretch(5)
    ours = profiler.of_process()
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(STRETCHES):
        for recorded in (number % 2 == 0, number % 2 == 1):
            ours.request(EVERYTHING if recorded else NOTHING)
            stretch(2)
            times[recorded].append(stretch(STEPS))
    ours.request(NOTHING)
    stretch(1)
    hooks_s = own_time(ours)
    calls = 100_000
    begin = time.perf_counter()
    for _ in range(calls):
        optimizer_hook._after_step(optimizer, (), {})
    hook_s = (time.perf_counter() - begin) / calls
    if dist.get_rank() == 0:
        result = {"off": times[False], "on": times[True], "hook_s": hook_s, "hooks_s": hooks_s}
        print("RESULT", json.dumps(result), flush=True)
    dist.destroy_process_group()


main()
