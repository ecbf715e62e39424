"""What the attacks share: forged calls against a live server, counted, and a flood."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
) -> int:
    """Send requests full of empty parts. Returns how many bytes were offered."""
    payload, offered = EMPTY_PARTS[method] * (size // 2), 0
    began = perf_counter()

    def goes_on() -> bool:
        lasted = perf_counter() - began
        return lasted < seconds or (offered < at_least and lasted < seconds * MOST_LONGER)

    async def one() -> None:
        nonlocal offered
        async with aio.insecure_channel(address, options=CHANNEL) as channel:
            while goes_on():
                status = await tried.call(channel, method, payload, metadata)
                assert status in REFUSED or method == HEALTH, f"{method} was answered with {status}"
                offered += len(payload)

    await asyncio.gather(*(one() for _ in range(16)))
    return offered


async def flood_from_another_process(
    address: str, method: str, size: int, seconds: float, at_least: int = 0
) -> int:
    """The same without using the time of this process. Returns the bytes that were offered."""
    words = (address, method, str(size), str(seconds), str(at_least))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, "a request of a stranger was answered"
    return int(out)


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


if __name__ == "__main__":
    where, what, length, lasting, least = sys.argv[1:]
    sent = asyncio.run(flood(where, what, int(length), float(lasting), Tried(), int(least)))
    sys.stdout.write(f"{sent}\n")
