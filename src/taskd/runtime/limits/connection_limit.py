"""Keeps one address from taking all descriptors of a server: others could not connect any more.

gRPC drops connections that say nothing, but only after seconds, and new ones replace them. So when
a server runs out of descriptors, an address with more than its share loses its newest connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

log = logging.getLogger(__name__)

PRESSURE, SHARE = 2 / 3, 1 / 3
"""Of all descriptors: from how many in use on, and how many one address may keep then."""
INTERVAL_S = 0.5
DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class Connection:
    fd: int
    address: str
    age: int
    """The inode of the socket: a newer one has a higher number."""
    port: int = 0
    """Of the peer."""


def to_close(connections: Iterable[Connection], used: int, limit: int) -> list[Connection]:
    """The newest ones of each address that has too many."""
    if used < limit * PRESSURE:
        return []
    by_address = defaultdict(list)
    for one in connections:
        by_address[one.address].append(one)
    keep = int(limit * SHARE)
    return [
        one for same in by_address.values() for one in sorted(same, key=lambda one: one.age)[keep:]
    ]


async def watch() -> None:
    """Look at the connections that this process has accepted, on any port. Runs forever."""
    while True:
        await asyncio.sleep(INTERVAL_S)
        enforce(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def enforce(limit: int) -> int:
    """Returns how many connections were closed."""
    descriptors = _descriptors(limit)
    if len(descriptors) < limit * PRESSURE:
        return 0
    closing = to_close(_connections(descriptors), len(descriptors), limit)
    for one in closing:
        _shut_down(one)
    if closing:
        log.warning(
            "the newest connections of addresses with too many were closed: addresses=%s closed=%d "
            "descriptors=%d limit=%d",
            ",".join(sorted({one.address for one in closing})[:5]),
            len(closing),
            len(descriptors),
            limit,
        )
    return len(closing)


def _descriptors(limit: int) -> Sequence[int]:
    try:
        return [int(name) for name in os.listdir(DESCRIPTORS)]
    except OSError:  # there is none left to read the folder with
        return range(limit)


def _connections(descriptors: Iterable[int]) -> list[Connection]:
    """Those that peers have opened: their local port is one that this process listens on."""
    found: list[tuple[int, Connection]] = []
    ports = set()
    for fd, inode, one in _tcp_sockets(descriptors):
        try:
            port = one.getsockname()[1]
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(port)
            else:
                peer = one.getpeername()
                found.append((port, Connection(fd, peer[0], inode, peer[1])))
        except OSError:
            continue  # it has been closed by its peer
    return [one for port, one in found if port in ports]


def _tcp_sockets(descriptors: Iterable[int]) -> Iterator[tuple[int, int, socket.socket]]:
    """Each with its inode. They belong to their servers, and are not closed here."""
    for fd in descriptors:
        try:
            status = os.fstat(fd)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            one = socket.socket(fileno=fd)
        except OSError:
            continue  # closed in the meantime
        try:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                yield fd, status.st_ino, one
        finally:
            one.detach()


def close_peers(peers: Set[tuple[str, int]]) -> int:
    """Close the connections of these peers. Returns how many there were."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    found = [
        one
        for one in _connections(_descriptors(limit))
        if (one.address.removeprefix("::ffff:"), one.port) in peers
    ]
    for one in found:
        _shut_down(one)
    return len(found)


def set_option(port: int, option: int, value: bytes) -> None:
    """Of the sockets that listen on this port. Raises OSError if the kernel does not have it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for _, _, one in _tcp_sockets(_descriptors(limit)):
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1] == port:
            one.setsockopt(socket.SOL_SOCKET, option, value)


def _shut_down(connection: Connection) -> None:
    try:
        if os.fstat(connection.fd).st_ino != connection.age:
            return
        one = socket.socket(fileno=connection.fd)
    except OSError:
        return
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
    finally:
        one.detach()
