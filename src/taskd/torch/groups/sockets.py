"""Finds this process's own sockets, so that a gloo group can be aborted within milliseconds.

gloo's `abort()` leaves a rank blocked until its timeout. Shutting down the group's connected
sockets frees it at once; touching the listening one would crash the process. `transport.py` knows
which ports belong to the group.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

DESCRIPTORS = "/proc/self/fd"
KEEPALIVE_S = 3


@dataclass(frozen=True, slots=True)
class SocketInfo:
    """A TCP socket of this process. The inode tells whether the descriptor is still the same."""

    fd: int
    inode: int
    listening: bool
    port: int
    peer_port: int
    """0 when it is not connected."""


def scan(known: frozenset[int] = frozenset()) -> list[SocketInfo]:
    """Every TCP socket of this process whose inode is not among the known ones."""
    found = []
    for fd in _descriptors():
        try:
            inode = _socket_inode(fd)
            if inode is not None and inode not in known:
                found.append(_inspect(fd, inode))
        except OSError:
            continue  # closed in the meantime, or not a TCP socket
    return [one for one in found if one is not None]


def inodes() -> frozenset[int]:
    """The sockets that exist now."""
    found = set()
    for fd in _descriptors():
        with suppress(OSError):
            found.add(_socket_inode(fd))
    return frozenset(inode for inode in found if inode is not None)


def shut_down(one: SocketInfo) -> bool:
    """Shut a connected socket down in both directions, if it is still the same one."""
    try:
        duplicate = os.dup(one.fd)
    except OSError:
        return False
    try:
        if one.listening or os.fstat(duplicate).st_ino != one.inode:
            return False
        with socket.socket(fileno=os.dup(duplicate)) as handle:
            handle.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        os.close(duplicate)


def enable_keepalive(one: SocketInfo) -> None:
    """Let a connection fail when its peer has not answered the kernel for `KEEPALIVE_S`."""
    with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_S)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000)


def local_address(one: SocketInfo) -> str:
    """Our own address at this socket."""
    with socket.socket(fileno=os.dup(one.fd)) as handle:
        address = str(handle.getsockname()[0])
    return address.removeprefix("::ffff:")


def _descriptors() -> Iterator[int]:
    for name in os.listdir(DESCRIPTORS):
        yield int(name)


def _socket_inode(fd: int) -> int | None:
    """None: the descriptor is not a socket."""
    status = os.fstat(fd)
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _inspect(fd: int, inode: int) -> SocketInfo | None:
    with socket.socket(fileno=os.dup(fd)) as handle:
        if handle.type != socket.SOCK_STREAM or handle.family == socket.AF_UNIX:
            return None
        listening = bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        port = handle.getsockname()[1]
        try:
            peer_port = handle.getpeername()[1]
        except OSError:
            peer_port = 0
    return SocketInfo(fd, inode, listening, port, peer_port)
