"""What strangers cost who send 100 MB/s for ten seconds to clusterd, and to a job that trains.

The attacker, its target and the caller share this machine, which alone makes every call slower: so
the times are compared with those beside two processes that only use as much processor time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from grpc import aio

from taskd.agent.run.plan import free_port
from taskd.runtime.tokens import OPERATOR, token_for
from tests.attack.attacks import (
    DECLARE,
    DISCOVER,
    MemoryWatch,
    busy_machine,
    flood_from_another_process,
)
from tests.attack.test_clusterd import (
    MOST_GROWTH_MIB,
    MOST_SLOWER,
    OFFERED,
    SECRET,
    latencies,
    running_server,
)
from tests.bench.rows import Row
from tests.integration.run.run_job import Job, script

FLOOD_S, CALM_S = 10.0, 6.0
MOST_SLOWER_STEP = 1.1
TRAIN = """
import sys, time
import torch
import taskd.torch as taskd

job = taskd.init("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
with open(sys.argv[1], "w") as file:
    for step in job.steps(100_000):
        began = time.monotonic()
        with step:
            optimizer.zero_grad()
            model(torch.ones(64, 256)).sum().backward()
            optimizer.step()
        file.write(f"{began} {time.monotonic() - began}\\n")
        file.flush()
        if int(step) == 20:
            print("trains", flush=True)
        time.sleep(0.02)
"""


def measure() -> list[Row]:
    with TemporaryDirectory() as folder:
        return [*_of_clusterd(Path(folder)), *_of_a_job(Path(folder))]


def _of_clusterd(folder: Path) -> list[Row]:
    token = token_for(SECRET.replace(" ", "-"), OPERATOR)

    async def main(address: str, pid: int) -> list[Row]:
        async with aio.insecure_channel(address) as channel:
            async with busy_machine():
                calm = await latencies(channel, token, CALM_S)
            async with MemoryWatch(pid) as memory:
                attack = asyncio.create_task(
                    flood_from_another_process(address, DECLARE, 4_000_000, FLOOD_S, OFFERED)
                )
                during = await latencies(channel, token, 60.0, lambda: not attack.done())
                offered = await attack
        times = [found[int(len(found) * 0.99)] for found in (calm, during)]
        return [
            _memory("clusterd", memory.growth_mib, offered),
            Row(
                "p99 of `taskd jobs` meanwhile, against a clusterd beside two busy processes",
                f"{times[1] * 1000:.1f} ms ({len(during)} calls)",
                f"{times[0] * 1000:.1f} ms ({len(calm)} calls)",
                times[1] / times[0],
                MOST_SLOWER,
            ),
        ]

    with running_server(folder) as (address, pid):
        return asyncio.run(main(address, pid))


def _of_a_job(folder: Path) -> list[Row]:
    port, steps = free_port(), folder / "steps"
    words = ["--nproc-per-node=2", f"--manager-port={port}", script(folder, TRAIN), str(steps)]
    job = Job(folder, *words)
    try:
        job.wait_for("trains")

        async def main() -> tuple[int, float, list[float], list[float]]:
            async with busy_machine():
                calm = await _steps(steps, lambda: asyncio.sleep(CALM_S))
            async with MemoryWatch(job.manager().pid) as memory:
                address = f"127.0.0.1:{port}"
                offered = 0

                async def attack() -> None:
                    nonlocal offered
                    offered = await flood_from_another_process(
                        address, DISCOVER, 8_000_000, FLOOD_S, OFFERED
                    )

                during = await _steps(steps, attack)
            return offered, memory.growth_mib, calm, during

        offered, growth, calm, during = asyncio.run(main())
    finally:
        job.signal()
        job.end()
    return [
        _memory("the manager of a job", growth, offered),
        Row(
            "a training step of two ranks meanwhile, against steps beside two busy processes",
            f"{median(during) * 1000:.1f} ms (median of {len(during)})",
            f"{median(calm) * 1000:.1f} ms (median of {len(calm)})",
            median(during) / median(calm),
            MOST_SLOWER_STEP,
        ),
    ]


def _memory(whose: str, growth_mib: float, offered: int) -> Row:
    return Row(
        f"memory that {offered / 1e9:.1f} GB of requests without a token cost {whose}, in MiB",
        f"{growth_mib:.0f} MiB",
        "",
        growth_mib,
        MOST_GROWTH_MIB,
    )


async def _steps(file: Path, wait: Callable[[], Awaitable[None]]) -> list[float]:
    """The durations of the steps that began while this was awaited."""
    began = time.monotonic()
    await wait()
    ended = time.monotonic()
    text = await asyncio.to_thread(file.read_text)
    lines = [line.split() for line in text.splitlines()[:-1]]
    return [float(took) for at, took in lines if began <= float(at) <= ended]
