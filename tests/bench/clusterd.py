"""clusterd under load: 2,000 subscribed jobs, 200 faults at once; and the time of one decision.

The server is a separate process with a journal on disk; every job has its own connection. Times are
measured by the client: from before it sends the report until it has read the stop signal. An empty
call and a bare fsync are measured in the same loop, to show what network and disk take.
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
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from grpc import aio

from taskd.wire._pb import recover_pb2 as pb
from tests import ROOT
from tests.bench.rows import Row, ms
from tests.integration.clusterd.client import Client, Signals

OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 30_000),
]
AT_ONCE = 100
WARM_UP = 50
"""Rounds until the journal file has its final size."""
WAIT_S = 120.0


@contextmanager
def server(journal: Path) -> Iterator[tuple[psutil.Process, str]]:
    command = [sys.executable, "-m", "taskd", "clusterd", "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, "--journal", str(journal)],
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


class Disk:
    """Measures one small append with fsync."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / "fsync").open("ab")

    def append_s(self) -> float:
        began = time.perf_counter()
        self._file.write(b"x" * 512)
        self._file.flush()
        os.fsync(self._file.fileno())
        return time.perf_counter() - began


async def in_turns(tasks: Sequence[Callable[[], Awaitable[None]]], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(task: Callable[[], Awaitable[None]]) -> None:
        async with gate:
            await task()

    await asyncio.gather(*(one(task) for task in tasks))


async def subscribe(client: Client, streams: dict[str, Signals]) -> None:
    await client.declare("recover-in-place", nodes=1, per_node=8)
    await client.join()
    streams[client.job] = await client.subscribe()


async def one_fault(client: Client, signals: Signals) -> float:
    """Return the seconds from the fault report to the stop signal."""
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


@dataclass
class Alone:
    """Times in seconds, with one fault at a time."""

    to_signal: list[float] = field(default_factory=list)
    bare_call: list[float] = field(default_factory=list)
    fsync: list[float] = field(default_factory=list)


class Decisions:
    """Faults one after the other, of ten jobs in turn: a single one would exceed its rate limit."""

    def __init__(self, channel: aio.Channel) -> None:
        self._clients = [Client(channel, job=f"alone{number}") for number in range(10)]
        self._streams: dict[str, Signals] = {}
        self._count = 0

    async def prepare(self) -> None:
        for client in self._clients:
            await subscribe(client, self._streams)

    async def one(self) -> float:
        """Return the seconds from a report to the stop signal."""
        client = self._clients[self._count % len(self._clients)]
        self._count += 1
        signals = self._streams[client.job]
        to_signal = await _to_signal(client, signals)
        await finish(client, signals)
        return to_signal


async def decisions(address: str, disk: Disk, rounds: int) -> Alone:
    unknown = pb.ClientInfo(jobId="unknown")
    times = Alone()
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        faults, client = Decisions(channel), Client(channel, job="unknown")
        await faults.prepare()
        for number in range(rounds + WARM_UP):
            to_signal = await faults.one()
            began = time.perf_counter()
            await client.code("HealthCheck", unknown)
            bare_call = time.perf_counter() - began
            if number >= WARM_UP:
                times.to_signal.append(to_signal)
                times.bare_call.append(bare_call)
                times.fsync.append(disk.append_s())
        return times


async def in_turn(addresses: Sequence[str], rounds: int) -> list[list[float]]:
    """The times to the stop signal of several servers, which take turns: they share the noise."""
    async with AsyncExitStack() as stack:
        servers = []
        for address in addresses:
            channel = aio.insecure_channel(address, options=OPTIONS)
            servers.append(Decisions(await stack.enter_async_context(channel)))
            await servers[-1].prepare()
        times = [[await one.one() for one in servers] for _ in range(rounds + WARM_UP)]
        return [list(column) for column in zip(*times[WARM_UP:], strict=True)]


async def _to_signal(client: Client, signals: Signals) -> float:
    """Return the seconds to the stop signal, which is sent before the report is answered."""
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
        with server(directory / "one") as (_, address):
            alone = asyncio.run(decisions(address, Disk(directory), rounds))
        with server(directory / "many") as (process, address):
            times = asyncio.run(many(address, jobs, faults))
            memory = process.memory_info().rss / 2**20
    fsync, call = statistics.median(alone.fsync), statistics.median(alone.bare_call)
    decision = statistics.median(alone.to_signal) - call
    p99 = sorted(times)[min(len(times) - 1, int(len(times) * 0.99))]
    return [
        Row(
            "one decision, on disk and sent: report → stop signal, minus a bare call",
            f"{decision * 1e3:.2f} ms (end to end {ms(alone.to_signal)})",
            f"2 ms + 1.5 fsync of {fsync * 1e3:.2f} ms; bare call {call * 1e3:.2f} ms",
            decision / (2e-3 + 1.5 * fsync),
            1.0,
        ),
        Row(
            f"{faults} faults at once among {jobs} subscribed jobs: stop signal read, p99",
            f"{p99 * 1e3:.0f} ms (median {statistics.median(times) * 1e3:.0f} ms), "
            f"{len(times)} of {faults} delivered",
            "1 s",
            p99 if len(times) == faults else float("inf"),
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
