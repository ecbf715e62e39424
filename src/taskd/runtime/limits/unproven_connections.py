"""Closes connections that send much before a call of theirs has been admitted.

gRPC reads all headers of a call before it calls anything of ours, up to 16 MiB of them until the
peer confirms a lower limit, and each byte may take 140 bytes of memory. So a thread looks at what
the kernel has received on each connection, whenever the process uses much processor time or its
memory has grown. It needs no event loop: in a flood the loop is late by seconds.

Our own clients send less than 2 KiB before they are admitted, and up to 64 KiB of their first
request.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO

from taskd.runtime.clock import monotonic
from taskd.runtime.limits.connect_filter import Address
from taskd.runtime.limits.connection_limit import (
    Connection,
    accepted_connections,
    open_descriptors,
    reset,
)
from taskd.runtime.limits.refused_callers import RefusedCallers, address_of

log = logging.getLogger(__name__)

PERIOD_S, FLOOD_PERIOD_S, LOOK_S = 0.05, 0.01, 5.0
"""How often the thread asks whether it has to look; in a flood; and when it looks at the latest."""
BUSY = 0.3
"""Cores that the process uses: from there on it looks."""
GROWTH_BYTES = 4 << 20
"""Of memory: the same."""
REST = 20
"""After a look, so many times as long as it took (in processor time) until the next one."""
MOST_UNPROVEN_BYTES, MOST_AFTER_FLOOD = 160 << 10, 8 << 10
"""What all unproven connections of one address together may have sent; and once that was too much,
for some seconds."""
MOST_TOGETHER = 1 << 20
"""Of all addresses: above it, those that have sent more than `MOST_AFTER_FLOOD` are closed."""
FORGOTTEN_PER_S = 256
"""Bytes, of each connection: those who ask for the health of a server never prove anything, nor do
those who come back every second with a wrong token."""
FLOOD_S = 10.0
RELEASE_S = 0.5
"""How often memory is given back in a flood, and after it. gRPC's Python part leaves the headers of
each call in a cycle of references, so only a full collection frees them."""
STATM, PAGE_BYTES = "/proc/self/statm", resource.getpagesize()
RECEIVED = struct.Struct("=128xQ")
"""In Linux's tcp_info."""

_libc = ctypes.CDLL(None)

Unproven = tuple[Connection, float]
"""With how many bytes have come on it, less those that are forgotten."""


@dataclass(frozen=True, slots=True)
class _Seen:
    at: float
    received: int
    counted: float


def to_close(unproven: Iterable[Unproven], flooding: Set[str] = frozenset()) -> list[Connection]:
    """Where an address, or all together, have sent too much: those that have sent the most."""
    totals, together, closing = defaultdict[str, float](float), 0.0, []
    for one, count in sorted(unproven, key=lambda one: one[1]):
        totals[one.address] += count
        most = MOST_AFTER_FLOOD if one.address in flooding else MOST_UNPROVEN_BYTES
        is_much = together + count > MOST_TOGETHER and count > MOST_AFTER_FLOOD
        if is_much or totals[one.address] > most:
            closing.append(one)
        else:
            together += count
    return closing


class UnprovenConnections:
    """Of the server that listens on one port."""

    def __init__(self) -> None:
        self._proven: dict[str, int] = {}
        """Peers, as gRPC names them, with the inode of their connection; 0: not known yet. Another
        peer may get the same port later."""
        self._flooding: dict[str, float] = {}
        """Addresses, and until when they count as such."""
        self._seen: dict[int, _Seen] = {}
        """Unproven connections, by inode."""

    def proved(self, peer: str) -> None:
        """A call of this peer was admitted."""
        self._proven[peer] = 0

    def enforce(self, port: int, now: float) -> list[Connection]:
        """Close what is too much. Returns which connections that were."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        admitted = list(self._proven.items())  # first: a new one must not look like a closed one
        connections = accepted_connections(open_descriptors(limit), port)
        proven = self._still_proven(admitted, connections)
        unproven = [one for one in connections if one.age not in proven]
        self._seen = {one.age: self._look_at(one, now) for one in unproven}
        self._flooding = {one: until for one, until in self._flooding.items() if until > now}
        counted = ((one, self._seen[one.age].counted) for one in unproven)
        closing = to_close(counted, self._flooding.keys())
        for one in closing:
            reset(one)
            self._flooding[one.address] = now + FLOOD_S
        if closing:
            log.warning(
                "connections were closed because they had sent much before an admitted call: "
                "addresses=%s closed=%d",
                ",".join(sorted({one.address for one in closing})[:5]),
                len(closing),
            )
        return closing

    def _still_proven(
        self, admitted: Iterable[tuple[str, int]], connections: Iterable[Connection]
    ) -> set[int]:
        """The inodes of connections with an admitted call. Forgets those that were closed."""
        inodes = {_key(one.address, one.port): one.age for one in connections}
        found = set()
        for peer, before in admitted:
            inode = inodes.get(address_of(peer), 0)
            if inode and before in (0, inode):
                self._proven[peer] = inode
                found.add(inode)
            else:
                self._proven.pop(peer, None)
        return found

    def _look_at(self, one: Connection, now: float) -> _Seen:
        before, total = self._seen.get(one.age, _Seen(now, 0, 0.0)), received(one)
        forgotten = FORGOTTEN_PER_S * (now - before.at)
        counted = before.counted + total - before.received - forgotten
        return _Seen(now, total, max(0.0, counted))

    async def watch(self, port: int, refused: RefusedCallers) -> None:
        """Look again and again, in a thread. Runs forever."""
        loop, end = asyncio.get_running_loop(), threading.Event()

        def hold_off(addresses: Set[Address]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(refused.hold_off, addresses)

        threading.Thread(
            target=self._look_again, args=(end, port, hold_off), name="taskd unproven", daemon=True
        ).start()
        try:
            await loop.create_future()
        finally:
            end.set()

    def _look_again(
        self, end: threading.Event, port: int, hold_off: Callable[[Set[Address]], None]
    ) -> None:
        with open(STATM, "rb", buffering=0) as statm:  # always there, on Linux
            now, used, memory = monotonic(), time.process_time(), _memory_bytes(statm)
            looked, released, pause_s = now, now, PERIOD_S
            while not end.wait(pause_s):
                pause_s = FLOOD_PERIOD_S if self._flooding else PERIOD_S
                before, now = now, monotonic()
                used_before, used = used, time.process_time()
                if self._flooding and now > released + RELEASE_S:
                    release_memory()
                    released, memory = monotonic(), _memory_bytes(statm)
                is_busy = used - used_before > BUSY * (now - before)
                has_grown = _memory_bytes(statm) > memory + GROWTH_BYTES
                if is_busy or has_grown or self._flooding or now > looked + LOOK_S:
                    began = time.thread_time()
                    if closed := self.enforce(port, now):
                        hold_off({key[0] for one in closed if (key := _key(one.address, one.port))})
                    looked, memory = now, _memory_bytes(statm)
                    pause_s = max(FLOOD_PERIOD_S, REST * (time.thread_time() - began))


def release_memory() -> None:
    """Give what a flood has taken back to the system."""
    gc.collect()
    if (trim := getattr(_libc, "malloc_trim", None)) is not None:  # not in musl
        trim(0)


def _memory_bytes(statm: FileIO) -> int:
    return int(os.pread(statm.fileno(), 100, 0).split()[1]) * PAGE_BYTES


def _key(host: str, port: int) -> tuple[Address, int] | None:
    return address_of(f"ip:{host}:{port}")


def received(connection: Connection) -> int:
    """Bytes, as the kernel says; 0: the connection has been closed."""
    try:
        if os.fstat(connection.fd).st_ino != connection.age:
            return 0
        one = socket.socket(fileno=connection.fd)
    except OSError:
        return 0
    try:
        found: int = RECEIVED.unpack(
            one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED.size)
        )[0]
    except (OSError, struct.error):
        return 0
    finally:
        one.detach()
    return found
