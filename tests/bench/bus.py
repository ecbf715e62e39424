"""The bus against bare gRPC: latency, throughput, a broadcast to a thousand nodes, import time.

All parts are real processes. Runs of bare gRPC alternate with ours.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import IO

import grpc

from taskd.bus.endpoint import Bus, BusConfig, PeerJoined
from taskd.model.codes import NetCode
from taskd.model.ids import manager, worker
from taskd.model.messages import Park
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire._pb.tasknet_pb2_grpc import TaskNetStub
from taskd.wire.bus_bodies import encode
from taskd.wire.bus_frames import position_to_pb
from tests.bench.rows import Row, ms

ROUNDS, CALLS, STREAMED = 7, 150, 4000
PROXIES, HOLDERS, BROADCASTS = 1000, 4, 5
RESTARTS = 9
BODY = Park(incident=1, because="bench")  # type: ignore[arg-type]


class Part:
    """A process that runs tests/bench/bus_part.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.stdin: IO[str] = process.stdin
        self.stdout: IO[str] = process.stdout

    def request(self, word: str) -> None:
        self.stdin.write(word + "\n")
        self.stdin.flush()

    def reply(self) -> list[str]:
        words = self.stdout.readline().split()
        assert words, "a process of the benchmark has exited"
        return words


@contextmanager
def part(*arguments: str) -> Iterator[Part]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.bus_part", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Part(process)
    finally:
        process.kill()
        process.wait()


def message() -> pb.Message:
    header = pb.MessageHeader(
        uuid="0123456789abcdef-1",
        mtype="default",
        sync=True,
        src=position_to_pb(manager()),
        dst=position_to_pb(worker(0, 0)),
    )
    return pb.Message(header=header, body=encode(BODY))


def through_one_proxy() -> list[Row]:
    """Manager in this process; proxy, worker and the bare gRPC server in their own processes."""
    with part("bare") as bare:
        return asyncio.run(_through_one_proxy(int(bare.reply()[0])))


async def _through_one_proxy(bare_port: int) -> list[Row]:
    bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0"))
    await bus.start()
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        prx = stack.enter_context(part("proxy", f"127.0.0.1:{bus.port}"))
        [port] = await loop.run_in_executor(None, prx.reply)
        wrk = stack.enter_context(part("leaf", f"127.0.0.1:{port}", str(STREAMED)))
        await loop.run_in_executor(None, wrk.reply)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{bare_port}") as channel:
            rows = [
                await _latency(bus, TaskNetStub(channel)),  # type: ignore[no-untyped-call]
                await _throughput(bus, wrk, channel),
            ]
    await bus.close()
    return rows


async def _latency(bus: Bus, stub: TaskNetStub) -> Row:
    ours: list[float] = []
    bare: list[float] = []
    ratios = []
    for _ in range(ROUNDS):
        for _ in range(CALLS):
            began = time.perf_counter()
            await stub.TransferMessage(message())
            bare.append(time.perf_counter() - began)
        for _ in range(CALLS):
            began = time.perf_counter()
            sent = await bus.send(worker(0, 0), BODY)
            ours.append(time.perf_counter() - began)
            assert sent.code == NetCode.OK
        ratios.append(median(ours[-CALLS:]) / median(bare[-CALLS:]))
    return Row(
        "manager → worker through one proxy, acknowledged",
        ms(ours),
        f"{ms(bare)} for a bare grpc.aio call",
        ratio=median(ratios),
        target=4.0,
    )


async def _throughput(bus: Bus, wrk: Part, channel: grpc.aio.Channel) -> Row:
    loop = asyncio.get_running_loop()
    ours: list[float] = []
    bare: list[float] = []
    # The worker has already counted the messages of the latency test.
    for _ in range((-ROUNDS * CALLS) % STREAMED):
        await bus.send(worker(0, 0), BODY, sync=False)
    await loop.run_in_executor(None, wrk.reply)
    for _ in range(ROUNDS):
        stream = channel.stream_unary(
            "/Bare/Stream",
            request_serializer=pb.Message.SerializeToString,
            response_deserializer=pb.Ack.FromString,
        )()  # type: ignore[call-arg]
        began = time.monotonic()
        for _ in range(STREAMED):
            await stream.write(message())
        await stream.done_writing()
        assert (await stream).code == STREAMED
        bare.append(STREAMED / (time.monotonic() - began))
        began = time.monotonic()
        for _ in range(STREAMED):
            await bus.send(worker(0, 0), BODY, sync=False)
        [ended] = await loop.run_in_executor(None, wrk.reply)
        ours.append(STREAMED / (float(ended) - began))
    return Row(
        "messages per second, manager → worker through one proxy",
        f"{median(ours):,.0f}/s",
        f"{median(bare):,.0f}/s on a bare grpc.aio stream",
        ratio=median(one / other for one, other in zip(ours, bare, strict=True)),
        target=0.4,
        at_least=True,
    )


def broadcast() -> list[Row]:
    with ExitStack() as stack:
        boss = stack.enter_context(part("boss"))
        upstream = f"127.0.0.1:{boss.reply()[0]}"
        share = PROXIES // HOLDERS
        fleets = [
            stack.enter_context(part("fleet", upstream, str(first), str(share)))
            for first in range(0, PROXIES, share)
        ]
        for fleet in fleets:
            fleet.reply()
        seconds, memory_mib = [], []
        for _ in range(BROADCASTS):
            for one in (*fleets, boss):
                one.request("go")
            began, _, rss, below = boss.reply()
            assert int(below) == 10 * PROXIES
            seconds.append(max(float(fleet.reply()[0]) for fleet in fleets) - float(began))
            memory_mib.append(int(rss) / (1 << 20))
    return [
        Row(
            f"broadcast to {PROXIES:,} connected proxies of 9 positions each",
            ms(seconds),
            "1 s",
            ratio=median(seconds),
            target=1.0,
        ),
        Row(
            "memory of the manager meanwhile",
            f"{max(memory_mib):.0f} MiB",
            "300 MiB",
            ratio=max(memory_mib) / 300,
            target=1.0,
        ),
    ]


def after_manager_restart() -> list[Row]:
    """Proxy and worker are separate processes; the manager above them is closed and restarted."""
    return asyncio.run(_after_manager_restart())


async def _after_manager_restart() -> list[Row]:
    bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0"))
    await bus.start()
    address = f"127.0.0.1:{bus.port}"
    loop = asyncio.get_running_loop()
    seconds = []
    with ExitStack() as stack:
        prx = stack.enter_context(part("proxy", address))
        [port] = await loop.run_in_executor(None, prx.reply)
        wrk = stack.enter_context(part("leaf", f"127.0.0.1:{port}", str(STREAMED)))
        await loop.run_in_executor(None, wrk.reply)
        for _ in range(RESTARTS):
            await bus.close()
            began = time.perf_counter()
            bus = Bus(BusConfig(me=manager(), listen=address))
            changes = bus.changes()
            await bus.start()
            async for change in changes:
                if isinstance(change, PeerJoined):
                    break
            sent = await bus.send(worker(0, 0), BODY)
            assert sent.code == NetCode.OK
            seconds.append(time.perf_counter() - began)
    await bus.close()
    return [
        Row(
            "a manager is restarted: a worker below a proxy can be reached again",
            ms(seconds),
            "2 s",
            ratio=max(seconds) / 2,
            target=1.0,
        )
    ]


def import_time() -> list[Row]:
    def seconds(code: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - began

    pairs = [(seconds("import taskd"), seconds("pass")) for _ in range(15)]
    extra = median(ours - bare for ours, bare in pairs)
    return [
        Row(
            "`import taskd`, in addition to the start of Python",
            f"{extra * 1000:.1f} ms (median of {len(pairs)})",
            f"{ms([bare for _, bare in pairs])} for Python alone; limit 30 ms",
            ratio=extra / 0.030,
            target=1.0,
        )
    ]


def measure() -> list[Row]:
    return [*through_one_proxy(), *after_manager_restart(), *broadcast(), *import_time()]


def main() -> None:
    for row in measure():
        ratio = "" if row.ratio is None else f" ratio {row.ratio:.2f} (target {row.target})"
        print(f"{row.what}: {row.ours} against {row.against}{ratio}")


if __name__ == "__main__":
    main()
