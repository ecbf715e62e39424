"""What the attacks share: forged calls against a live server, counted, and a flood."""

from __future__ import annotations

import asyncio
import resource
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import psutil
from grpc import aio

from tests import ROOT

CHANNEL = (("grpc.max_send_message_length", 1 << 27), ("grpc.use_local_subchannel_pool", 1))
REFUSED = {"UNAUTHENTICATED", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT"}
REFUSED |= {"FAILED_PRECONDITION", "UNAVAILABLE", "UNIMPLEMENTED"}
DECLARE, DISCOVER = "/taskd.v1.Control/DeclareJob", "/TaskNet/PathDiscovery"
HEALTH = "/grpc.health.v1.Health/Check"
EMPTY_PARTS = {DECLARE: b"\x32\x00", DISCOVER: b"\x1a\x00", HEALTH: b"\x0a\x00"}
"""A sub-message without content: two bytes on the wire, and much more once it is parsed."""


@dataclass
class Tried:
    """How often each attack was tried, and with which result."""

    results: Counter[tuple[str, str]] = field(default_factory=Counter)

    async def call(self, channel: aio.Channel, method: str, payload: bytes, metadata: Any) -> str:
        """Make a forged call. Returns the status; "OK" means that it got through."""
        call = channel.unary_unary(method, None, None)
        try:
            await call(payload, metadata=metadata, timeout=20)
            status = "OK"
        except aio.AioRpcError as error:
            status = error.code().name
        self.results[method, status] += 1
        return status

    def show(self) -> str:
        return "\n".join(
            f"{count:6d} {method}: {status}"
            for (method, status), count in sorted(self.results.items())
        )


MOST_LONGER = 6
"""A busy machine offers less per second: a flood may last this many times longer."""


async def flood(
    address: str,
    method: str,
    size: int,
    seconds: float,
    tried: Tried,
    at_least: int = 0,
    metadata: Any = None,
    rate: float = 0.0,
) -> int:
    """Send requests full of empty parts, at most `rate` bytes per second if that is not zero.

    Returns how many bytes were offered.
    """
    payload, offered = EMPTY_PARTS[method] * (size // 2), 0
    began = perf_counter()

    def goes_on() -> bool:
        lasted = perf_counter() - began
        return lasted < seconds or (offered < at_least and lasted < seconds * MOST_LONGER)

    async def one() -> None:
        nonlocal offered
        async with aio.insecure_channel(address, options=CHANNEL) as channel:
            while goes_on():
                if rate and (early := offered / rate - (perf_counter() - began)) > 0:
                    await asyncio.sleep(early)
                    continue
                offered += len(payload)
                status = await tried.call(channel, method, payload, metadata)
                held_off = status == "DEADLINE_EXCEEDED"  # it could not connect any more
                assert held_off or status in REFUSED or method == HEALTH, (
                    f"{method} was answered with {status}"
                )

    await asyncio.gather(*(one() for _ in range(16)))
    return offered


async def flood_of_connections(
    address: str, method: str, size: int, seconds: float, rate: float
) -> int:
    """Connect, send the head of a request and as much of its body as any peer may send, repeat.

    Nothing here waits for an answer or obeys flow control: all bytes are on the wire. Returns how
    many they were.
    """
    host, port = address.rsplit(":", 1)
    data, sent = raw_request(method, address, size), 0
    began = perf_counter()

    async def one() -> None:
        nonlocal sent
        while (now := perf_counter() - began) < seconds:
            if (early := sent / rate - now) > 0:
                await asyncio.sleep(early)
                continue
            sent += len(data)
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.write(data)
                await writer.drain()
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(16)))
    return sent


async def flood_of_headers(
    address: str, method: str, size: int, seconds: float, rate: float
) -> int:
    """Calls with `size` headers of one byte each, as many as fit into a connection.

    The peer never confirms the server's settings: until then gRPC enforces no limit on headers.
    """
    host, port = address.rsplit(":", 1)
    began, sent = perf_counter(), 0
    call = headers(method, address) + EMPTY_HEADER * min(size, MOST_FRAME - 200)

    async def one() -> None:
        nonlocal sent
        while perf_counter() - began < seconds:
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1):  # it may be held off
                    reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(PREFACE)
                for number in range(1, 20_000, 2):
                    if (early := sent / rate - (perf_counter() - began)) > 0:
                        await asyncio.sleep(early)
                    if perf_counter() - began > seconds or reader.at_eof():
                        break
                    writer.write(frame(1, 5, number, call))
                    sent += len(call)
                    async with asyncio.timeout(1):
                        await writer.drain()
                writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(4)))
    return sent


EMPTY_HEADER = b"\x8f"
"""accept-charset, without a value: one byte on the wire."""
MOST_FRAME = 16_384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        struct.pack(">I", len(payload))[1:]
        + bytes([kind, flags])
        + struct.pack(">I", stream)
        + payload
    )


def headers(method: str, authority: str) -> bytes:
    def literal(name: str, value: str) -> bytes:
        return bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()

    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(literal(*field) for field in fields.items())


def raw_request(method: str, authority: str, size: int) -> bytes:
    """A new HTTP/2 connection with one call that has no token, cut after `size` bytes."""
    head = headers(method, authority)
    body = b"\0" + struct.pack(">I", 4 * size) + EMPTY_PARTS[method] * (size // 2)
    cut = [body[at : at + 16_384] for at in range(0, size, 16_384)]
    return PREFACE + frame(1, 4, 1, head) + b"".join(frame(0, 0, 1, part) for part in cut)


@dataclass(frozen=True, slots=True)
class Flood:
    """What the process of an attacker did."""

    offered: int
    """Bytes of the requests that it has begun to send."""
    cores: float
    """Processor time that it used itself, per second."""


async def flood_from_another_process(
    address: str,
    method: str,
    size: int,
    seconds: float,
    at_least: int = 0,
    rate: float = 0.0,
    way: str = "calls",
) -> Flood:
    """The same without using the time of this process. `way`: calls, connections or headers."""
    words = (way, address, method, str(size), str(seconds), str(at_least), str(rate))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, "a request of a stranger was answered"
    offered, cores = out.split()
    return Flood(int(offered), float(cores))


@asynccontextmanager
async def busy_machine() -> AsyncIterator[None]:
    """The attacker and its target share this machine: that alone makes every call slower."""
    burn = "while True: bytes(4_000_000)"
    burning = [await asyncio.create_subprocess_exec(sys.executable, "-c", burn) for _ in range(2)]
    try:
        yield
    finally:
        for one in burning:
            one.kill()
            await one.wait()


class MemoryWatch:
    """The peak of a process's memory while this block runs."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._peak = self._process.memory_info().rss

    async def __aenter__(self) -> MemoryWatch:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _look(self) -> None:
        while True:
            self._peak = max(self._peak, self._process.memory_info().rss)
            await asyncio.sleep(0.02)

    @property
    def growth_mib(self) -> float:
        return (self._peak - self._before) / 2**20


RAW = {"connections": flood_of_connections, "headers": flood_of_headers}


async def _attack(
    way: str, where: str, what: str, size: str, seconds: str, least: str, rate: str
) -> int:
    if way in RAW:
        return await RAW[way](where, what, int(size), float(seconds), float(rate))
    return await flood(
        where, what, int(size), float(seconds), Tried(), int(least), rate=float(rate)
    )


if __name__ == "__main__":
    start = perf_counter()
    total = asyncio.run(_attack(*sys.argv[1:]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    share = (used.ru_utime + used.ru_stime) / (perf_counter() - start)
    sys.stdout.write(f"{total} {share}\n")
