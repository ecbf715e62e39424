"""The TCP connections of this process: a way to free a rank that is blocked in gloo.

gloo has no call that aborts a collective which waits for a peer; its sockets can be shut down
instead. Used by the floor, given to NVIDIA's wrapper, which would otherwise wait for the timeout of
gloo, and used as the communication fault from which taskd has to recover.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Container, Iterable
from contextlib import suppress


def connections(except_to: Container[int] = ()) -> set[int]:
    """Return the descriptors of connected TCP sockets, except those to the given remote ports."""
    peers = {fd: _peer_port(fd) for fd in map(int, os.listdir("/proc/self/fd"))}
    return {fd for fd, port in peers.items() if port is not None and port not in except_to}


def cut(links: Iterable[int]) -> None:
    """Shut the links down; call this from another thread than the blocked one.

    Never pass a listening socket: gloo crashes. Gloo itself closes the link to a dead peer, hence
    the suppressed errors. No thread may open a descriptor meanwhile: it could get the number of a
    closed one and be cut, too.
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
