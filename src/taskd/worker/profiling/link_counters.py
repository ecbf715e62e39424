"""The kernel's accounts of this process's connections: bytes sent, and how long that took.

A slow link is not seen in any collective's duration, since all ranks wait for it alike; it is seen
in the accounts of the connection that crosses it. Linux keeps them for every TCP socket (TCP_INFO).
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress

from taskd.model.profiling import PeerConnection

TCP_ESTABLISHED = 1
_BUSY = struct.Struct("=QQ")
_BUSY_AT, _SENT_AT, _SIZE = 168, 200, 232
"""busy_time and rwnd_limited; bytes_sent; of struct tcp_info since Linux 4.19."""
ENOUGH_BYTES = 64 * 1024
"""Less than this says nothing about a link."""
MOST = 16


def of_process() -> tuple[PeerConnection, ...]:
    """The busiest connections, the most bytes first. Nothing where the kernel does not tell."""
    found = []
    for name in _descriptors():
        wire = _wire(name)
        if wire is not None and wire.sent_bytes >= ENOUGH_BYTES:
            found.append(wire)
    return tuple(sorted(found, key=lambda wire: -wire.sent_bytes)[:MOST])


def _descriptors() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/fd")]
    return []


def _wire(descriptor: int) -> PeerConnection | None:
    with suppress(OSError, struct.error, ValueError):
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        # A duplicate, so that closing ours leaves theirs alone.
        with socket.socket(fileno=os.dup(descriptor)) as there:
            if there.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            info = there.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            if len(info) < _SIZE or info[0] != TCP_ESTABLISHED:
                return None
            busy_us, stalled_us = _BUSY.unpack_from(info, _BUSY_AT)
            (sent,) = struct.unpack_from("=Q", info, _SENT_AT)
            here, peer = there.getsockname(), there.getpeername()
            busy_s = max(0, busy_us - stalled_us) / 1e6
            return PeerConnection(_end(here), _end(peer), sent, busy_s)
    return None


def _end(address: tuple[object, ...]) -> str:
    host = str(address[0]).removeprefix("::ffff:")
    return f"{host}:{address[1]}"
