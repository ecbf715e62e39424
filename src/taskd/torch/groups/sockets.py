"""Finds this process's own sockets, to cut a gloo group off within milliseconds.

gloo's `abort()` leaves a rank blocked until its timeout. Shutting down the group's connected
sockets frees it at once; touching the listening one would crash the process. `transport.py` says
which ports are the group's.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

FOLDER = "/proc/self/fd"
DEAD_S = 3


@dataclass(frozen=True, slots=True)
class Found:
    """A TCP socket of this process. The inode says whether the number still means the same."""

    fd: int
    inode: int
    listening: bool
    port: int
    peer_port: int
    """0 when it is not connected."""


def scan(known: frozenset[int] = frozenset()) -> list[Found]:
    """Every TCP socket of this process whose inode is not among the known ones."""
    found = []
    for fd in _descriptors():
        try:
            inode = _socket(fd)
            if inode is not None and inode not in known:
                found.append(_look(fd, inode))
        except OSError:
            continue  # closed since, or no TCP socket
    return [one for one in found if one is not None]


def inodes() -> frozenset[int]:
    """The sockets that exist now."""
    found = set()
    for fd in _descriptors():
        with suppress(OSError):
            found.add(_socket(fd))
    return frozenset(inode for inode in found if inode is not None)


def cut(one: Found) -> bool:
    """Shut a connected socket down in both directions, if it is still the same one."""
    try:
        mine = os.dup(one.fd)
    except OSError:
        return False
    try:
        if one.listening or os.fstat(mine).st_ino != one.inode:
            return False
        with socket.socket(fileno=os.dup(mine)) as handle:
            handle.shutdown(socket.SHUT_RDWR)
        return True
    except OSError:
        return False
    finally:
        os.close(mine)


def watch(one: Found) -> None:
    """Let a connection fail when its peer has not answered the kernel for `DEAD_S`."""
    with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as handle:
        handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_S)
        handle.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)


def host(one: Found) -> str:
    """Our own address at this socket."""
    with socket.socket(fileno=os.dup(one.fd)) as handle:
        address = str(handle.getsockname()[0])
    return address.removeprefix("::ffff:")


def _descriptors() -> Iterator[int]:
    for name in os.listdir(FOLDER):
        yield int(name)


def _socket(fd: int) -> int | None:
    """Its inode; None: it is something else."""
    what = os.fstat(fd)
    return what.st_ino if stat.S_ISSOCK(what.st_mode) else None


def _look(fd: int, inode: int) -> Found | None:
    with socket.socket(fileno=os.dup(fd)) as handle:
        if handle.type != socket.SOCK_STREAM or handle.family == socket.AF_UNIX:
            return None
        listening = bool(handle.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        port = handle.getsockname()[1]
        try:
            peer_port = handle.getpeername()[1]
        except OSError:
            peer_port = 0
    return Found(fd, inode, listening, port, peer_port)
