"""The TCP connections of this process: how a rank that is blocked in gloo gets free.

gloo has no call that ends a collective which waits for a healthy but failed peer; its sockets can
be shut down instead. Used by the floor, offered to NVIDIA's wrapper, which would wait for gloo's
timeout without it, and used as the communication fault that taskd has to get over.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Container, Iterable
from contextlib import suppress


def connections(except_to: Container[int] = ()) -> set[int]:
    """The descriptors that are connected TCP sockets, but for those to the given peers' ports."""
    peers = {fd: _peer_port(fd) for fd in map(int, os.listdir("/proc/self/fd"))}
    return {fd for fd, port in peers.items() if port is not None and port not in except_to}


def cut(links: Iterable[int]) -> None:
    """From another thread than the blocked one. Never a listening socket: gloo dies of that.

    Gloo closes the link to a dead peer by itself, hence the suppressed errors. Nobody may open a
    new descriptor in between, or it might get the number of a closed one and be cut too.
    """
    for fd in links:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            link.shutdown(socket.SHUT_RDWR)


def _peer_port(fd: int) -> int | None:
    with suppress(OSError):  # not connected, or the listing's own descriptor, closed by now
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6):
                    return int(link.getpeername()[1])
    return None
