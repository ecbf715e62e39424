"""clusterd under load: 2,000 subscribed jobs, 200 faults at once; and what one decision costs.

The server is a process of its own with a journal on disk, every job has a connection of its own.
Times are the client's: from before its report is sent until the stop signal has been read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from grpc import aio

from tests.bench.rows import Row, ms
from tests.integration.clusterd_client import Client, Signals

ROOT = Path(__file__).parents[2]
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 30_000),
]
AT_ONCE = 100
WAIT_S = 120.0


@contextmanager
def server(directory: Path) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "taskd", "clusterd", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--journal", str(directory / "journal")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "src"},
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().split()[-1]
        yield psutil.Process(process.pid), f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def bare_fsync_s(directory: Path, times: int = 200) -> float:
    """What the disk itself takes for one small append, in the same run."""
    taken = []
    with (directory / "fsync").open("ab") as file:
        for _ in range(times):
            began = time.perf_counter()
            file.write(b"x" * 512)
            file.flush()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def in_turns(tasks: Sequence[Callable[[], Awaitable[None]]], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(task: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await task()

    await asyncio.gather(*(one(task) for task in tasks))


async def subscribe(client: Client, streams: dict[str, Signals]) -> None:
    await client.declare("recover-in-place", nodes=1, per_node=8)
    await client.join()
    streams[client.job] = client.subscribe()


async def one_fault(client: Client, signals: Signals) -> float:
    """Seconds until the job has been told to stop. The round is then brought to its end."""
    began = time.perf_counter()
    assert await client.fault(3) == 0
    stop = await signals.next("stopTrain")
    took = time.perf_counter() - began
    return took if stop.jobId == client.job else float("nan")


async def finish(client: Client, signals: Signals) -> None:
    await client.stopped()
    await signals.next("globalFault")
    await client.offer("recover", "exit")
    await signals.next("changeStrategy")
    assert await client.result("recover") == 0


async def decisions(address: str, rounds: int) -> list[float]:
    """One job alone: how long from the report to the signal, again and again."""
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        client = Client(channel, job="alone")
        streams: dict[str, Signals] = {}
        await subscribe(client, streams)
        signals = streams["alone"]
        taken = []
        for number in range(rounds + 10):
            took = await _to_signal(client, signals)
            await finish(client, signals)
            if number >= 10:
                taken.append(took)
        return taken


async def _to_signal(client: Client, signals: Signals) -> float:
    """The signal alone: it is on its way before the report's own answer is."""
    began = time.perf_counter()
    report = asyncio.ensure_future(client.fault(3))
    await signals.next("stopTrain")
    took = time.perf_counter() - began
    assert await report == 0
    return took


async def many(address: str, jobs: int, faults: int) -> list[float]:
    async with AsyncExitStack() as stack:
        clients = []
        for number in range(jobs):
            channel = await stack.enter_async_context(
                aio.insecure_channel(address, options=OPTIONS)
            )
            clients.append(Client(channel, job=f"job{number}"))
        streams: dict[str, Signals] = {}
        await in_turns([lambda c=c: subscribe(c, streams) for c in clients], AT_ONCE)  # type: ignore[misc]
        hit = clients[:: max(jobs // faults, 1)][:faults]
        async with asyncio.timeout(WAIT_S):
            return list(await asyncio.gather(*(one_fault(c, streams[c.job]) for c in hit)))


def measure(jobs: int = 2_000, faults: int = 200, rounds: int = 200) -> list[Row]:
    with TemporaryDirectory(dir=ROOT, prefix=".bench-") as name:
        directory = Path(name)
        with server(directory) as (_, address):
            alone = asyncio.run(decisions(address, rounds))
            fsync = bare_fsync_s(directory)
        (directory / "journal").unlink()
        with server(directory) as (process, address):
            taken = asyncio.run(many(address, jobs, faults))
            memory = process.memory_info().rss / 2**20
    limit = 2e-3 + 1.5 * fsync
    p99 = sorted(taken)[min(len(taken) - 1, int(len(taken) * 0.99))]
    return [
        Row(
            "report sent → stop signal read, decision on disk; one job",
            ms(alone),
            f"2 ms + 1.5 x a bare fsync of {fsync * 1e3:.2f} ms",
            statistics.median(alone) / limit,
            1.0,
        ),
        Row(
            f"{faults} faults at once among {jobs} subscribed jobs: stop signal read, p99",
            f"{p99 * 1e3:.0f} ms (median {statistics.median(taken) * 1e3:.0f} ms), "
            f"{len(taken)} of {faults} delivered",
            "1 s",
            p99 if len(taken) == faults else float("inf"),
            1.0,
        ),
        Row(
            f"memory of the server with {jobs} jobs subscribed",
            f"{memory:.0f} MiB",
            "500 MiB",
            memory / 500,
            1.0,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2_000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    measured = measure(arguments.jobs, arguments.faults, arguments.rounds)
    for row in measured:
        print(f"{row.what}: {row.ours}, against {row.against}: {row.ratio:.2f} {row.met}")
    return 0 if all(row.met for row in measured) else 1


if __name__ == "__main__":
    sys.exit(main())
