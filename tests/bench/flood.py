"""What strangers cost who send 100 MB/s for ten seconds to clusterd, and to a job that trains.

Once as calls, whose bodies flow control keeps on the attacker's machine; once as connections, each
with as many bytes as a peer may send before it is asked for more, so that all of them arrive.

The attacker, its target and the caller share this machine. So the same is measured once more beside
a process that is not an attacker, and uses as much processor time as the attacker did.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from math import inf, isinf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from grpc import aio

from taskd.runtime.address import free_port
from taskd.runtime.tokens import OPERATOR, bearer, token_for
from taskd.wire._pb import control_pb2
from tests.attack.attacks import (
    DECLARE,
    DISCOVER,
    Flood,
    MemoryWatch,
    flood_from_another_process,
)
from tests.attack.test_clusterd import (
    CONTROL,
    MOST_GROWTH_MIB,
    MOST_SLOWER,
    OFFERED,
    SECRET,
    running_server,
)
from tests.bench.rows import Row
from tests.integration.run.run_job import Job, script

FLOOD_S = 10.0
RATE = OFFERED / FLOOD_S
SIZES = {"calls": 4_000_000, "connections": 65_535}
MOST_SLOWER_STEP = 1.1
TRAIN = """
import sys, time
import torch
import taskd.torch as taskd

job = taskd.init("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
with open(sys.argv[1] + str(job.rank), "w") as file:
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
USE = """
import sys, time
share, until = float(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    turn = time.monotonic() + 0.01 * min(share, 1)
    while time.monotonic() < turn:
        bytes(100_000)
    time.sleep(0.01 * (1 - min(share, 1)))
"""
"""Uses a share of a core for some seconds."""


def measure() -> list[Row]:
    with TemporaryDirectory() as folder:
        return _of_clusterd(Path(folder))


def measure_job() -> list[Row]:
    """The benchmark `flood_job`."""
    with TemporaryDirectory() as folder:
        return _of_a_job(Path(folder))


def _of_clusterd(folder: Path) -> list[Row]:
    token = token_for(SECRET.replace(" ", "-"), OPERATOR)

    async def main(address: str, pid: int) -> list[Row]:
        rows = []
        async with aio.insecure_channel(address) as channel:
            await _latencies(channel, token, asyncio.sleep(1))
            for way, size in SIZES.items():
                idle = await _latencies(channel, token, asyncio.sleep(FLOOD_S))
                server = psutil.Process(pid)
                async with MemoryWatch(pid) as memory:
                    attack = asyncio.create_task(
                        flood_from_another_process(address, DECLARE, size, FLOOD_S, 0, RATE, way)
                    )
                    with _Cores(server) as used:
                        during = await _latencies(channel, token, attack)
                    attacker = attack.result()
                async with _as_busy(attacker.cores):
                    busy = await _latencies(channel, token, asyncio.sleep(FLOOD_S))
                rows.append(_memory("clusterd", way, memory.growth_mib, attacker))
                calls = "p99 of `taskd jobs` meanwhile"
                own = f"clusterd used {used.cores:.2f} of a core"
                rows.append(
                    _p99(f"{calls}, against an idle machine; {own}", during, idle, MOST_SLOWER)
                )
                rows.append(_p99(f"{calls}, against one as busy", during, busy, MOST_SLOWER))
        return rows

    with running_server(folder) as (address, pid):
        return asyncio.run(main(address, pid))


def _of_a_job(folder: Path) -> list[Row]:
    port, steps = free_port(), folder / "steps"
    words = ["--nproc-per-node=2", f"--manager-port={port}", script(folder, TRAIN), str(steps)]
    job = Job(folder, *words)
    try:
        job.wait_for("trains")

        async def main() -> list[Row]:
            rows = []
            for way, size in SIZES.items():
                idle = await _steps(steps, lambda: asyncio.sleep(FLOOD_S))
                manager = job.manager()
                async with MemoryWatch(manager.pid) as memory:
                    attacker = Flood(0, 0.0)

                    async def attack(way: str = way, size: int = size) -> None:
                        nonlocal attacker
                        attacker = await flood_from_another_process(
                            f"127.0.0.1:{port}", DISCOVER, size, FLOOD_S, 0, RATE, way
                        )

                    with _Cores(psutil.Process(manager.pid)) as used:
                        during = await _steps(steps, attack)
                async with _as_busy(attacker.cores):
                    busy = await _steps(steps, lambda: asyncio.sleep(FLOOD_S))
                rows.append(_memory("the manager of a job", way, memory.growth_mib, attacker))
                step = "a training step of two ranks meanwhile"
                own = f"the manager used {used.cores:.2f} of a core"
                rows.append(_step(f"{step}, against an idle machine; {own}", during, idle, None))
                rows.append(_step(f"{step}, against one as busy", during, busy, MOST_SLOWER_STEP))
            return rows

        return asyncio.run(main())
    finally:
        job.signal()
        job.end()


def _memory(whose: str, way: str, growth_mib: float, attacker: Flood) -> Row:
    return Row(
        f"100 MB/s for 10 s as {way} without a token: memory that they cost {whose}, in MiB",
        f"{growth_mib:.0f} MiB",
        f"{attacker.offered / 1e9:.2f} GB got that far; the attacker used {attacker.cores:.2f} of "
        f"{os.cpu_count()} cores",
        growth_mib,
        MOST_GROWTH_MIB,
    )


def _p99(what: str, during: list[float], before: list[float], target: float) -> Row:
    times = [found[int(len(found) * 0.99)] for found in (during, before)]
    failed = sum(map(isinf, during))
    return Row(
        what,
        f"{times[0] * 1000:.1f} ms ({len(during)} calls, {failed} failed, "
        f"median {median(during) * 1000:.1f} ms)",
        f"{times[1] * 1000:.1f} ms ({len(before)} calls, median {median(before) * 1000:.1f} ms)",
        times[0] / times[1],
        target,
    )


def _step(what: str, during: list[float], before: list[float], target: float | None) -> Row:
    return Row(
        what,
        f"{median(during) * 1000:.1f} ms (median of {len(during)})",
        f"{median(before) * 1000:.1f} ms (median of {len(before)})",
        median(during) / median(before),
        target,
    )


async def _latencies(
    channel: aio.Channel, token: str, during: Coroutine[Any, Any, None] | asyncio.Task[Any]
) -> list[float]:
    """Of calls meanwhile; infinite: the call has failed."""
    end, jobs, took = asyncio.ensure_future(during), CONTROL(channel).Jobs, []
    while not end.done():
        began = time.perf_counter()
        try:
            await jobs(control_pb2.JobsRequest(), metadata=bearer(token), timeout=60)
            took.append(time.perf_counter() - began)
        except aio.AioRpcError:
            took.append(inf)
        await asyncio.wait([end], timeout=0.01)
    return sorted(took)


class _Cores:
    """How many cores a process uses in this block."""

    cores = 0.0

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def __enter__(self) -> _Cores:
        self._before, self._began = self._process.cpu_times(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        after: Any = self._process.cpu_times()
        used = after.user + after.system - self._before.user - self._before.system
        self.cores = used / (time.monotonic() - self._began)


@asynccontextmanager
async def _as_busy(cores: float) -> AsyncIterator[None]:
    """Another process that uses as many cores."""
    shares = [1.0] * int(cores) + [cores % 1]
    using = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", USE, str(share), "60")
        for share in shares
    ]
    try:
        yield
    finally:
        for one in using:
            one.kill()
            await one.wait()


async def _steps(file: Path, wait: Callable[[], Awaitable[None]]) -> list[float]:
    """The durations of the steps of rank 0 that began while this was awaited."""
    began = time.monotonic()
    await wait()
    ended = time.monotonic()
    text = await asyncio.to_thread(Path(f"{file}0").read_text)
    lines = [line.split() for line in text.splitlines()[:-1]]
    return [float(took) for at, took in lines if began <= float(at) <= ended]
