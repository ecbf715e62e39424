"""What the kernel knows about our TCP connections: whether the peer's machine still answers.

gRPC owns the sockets and shows only the peer's address, by which the socket is found. Used rarely,
only for a peer whose heartbeats are late.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from urllib.parse import unquote

from taskd.model.bus import TcpState

_INFO = struct.Struct("=8B24I")
"""The first part of Linux's `struct tcp_info`, the same in every kernel."""
_UNACKED, _LAST_ACK_RECV, _RTT, _RTTVAR = 12, 20, 23, 24
LEAST_RTO_S = 0.2
"""Linux never waits less before it sends again."""


class TcpConnections:
    def __init__(self) -> None:
        self._sockets: dict[tuple[str, int], int] = {}

    def look(self, peer: str) -> TcpState | None:
        """`peer` is gRPC's name of the peer. None: no such TCP connection."""
        address = _address(peer)
        if address is None:
            return None
        file = self._sockets.get(address)
        if file is None or _peer_of(file) != address:
            self._sockets = _connected()
            file = self._sockets.get(address)
        return None if file is None else _look_at(file)


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = unquote(peer).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """gRPC's server listens on IPv6 for both, so it shows IPv4 addresses as mapped IPv6 ones."""
    return host.lower().removeprefix("::ffff:").partition("%")[0]


def _connected() -> dict[tuple[str, int], int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        address = _peer_of(int(name))
        if address is not None:
            found[address] = int(name)
    return found


def _peer_of(file: int) -> tuple[str, int] | None:
    with suppress(OSError):
        borrowed = socket.socket(fileno=file)
        try:
            if borrowed.family in (socket.AF_INET, socket.AF_INET6):
                host, port = borrowed.getpeername()[:2]
                return _plain(host), port
        finally:
            borrowed.detach()
    return None


def _look_at(file: int) -> TcpState | None:
    with suppress(OSError):
        borrowed = socket.socket(fileno=file)
        try:
            raw = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        finally:
            borrowed.detach()
        if len(raw) == _INFO.size:
            info = _INFO.unpack(raw)
            usual_s = (info[_RTT] + 4 * info[_RTTVAR]) / 1e6
            quiet_s = info[_LAST_ACK_RECV] / 1e3
            return TcpState(info[_UNACKED] > 0, quiet_s, max(LEAST_RTO_S, usual_s))
    return None
