"""The kernel's TCP counters of this process's connections: bytes sent, and time spent sending.

A slow link does not show in the duration of a collective, because all ranks wait for it equally. It
shows in the counters of the connection that uses it. Linux has them for every TCP socket
(TCP_INFO).
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
"""Offsets in struct tcp_info since Linux 4.19: busy_time and rwnd_limited; bytes_sent."""
ENOUGH_BYTES = 64 * 1024
"""With fewer bytes, the counters say nothing about a link."""
MOST = 16


def of_process() -> tuple[PeerConnection, ...]:
    """The busiest connections, most bytes first. Empty if the kernel has no such counters."""
    found = []
    for descriptor in _descriptors():
        connection = _connection(descriptor)
        if connection is not None and connection.sent_bytes >= ENOUGH_BYTES:
            found.append(connection)
    return tuple(sorted(found, key=lambda connection: -connection.sent_bytes)[:MOST])


def _descriptors() -> list[int]:
    with suppress(OSError):
        return [int(name) for name in os.listdir("/proc/self/fd")]
    return []


def _connection(descriptor: int) -> PeerConnection | None:
    with suppress(OSError, struct.error, ValueError):
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        # A duplicate: closing it does not close the original.
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE)
            if len(info) < _SIZE or info[0] != TCP_ESTABLISHED:
                return None
            busy_us, stalled_us = _BUSY.unpack_from(info, _BUSY_AT)
            (sent,) = struct.unpack_from("=Q", info, _SENT_AT)
            own, peer = duplicate.getsockname(), duplicate.getpeername()
            busy_s = max(0, busy_us - stalled_us) / 1e6
            return PeerConnection(_address(own), _address(peer), sent, busy_s)
    return None


def _address(address: tuple[object, ...]) -> str:
    host = str(address[0]).removeprefix("::ffff:")
    return f"{host}:{address[1]}"
