"""The TCP connections of this process: how a rank that is blocked in gloo gets free.

gloo has no call that ends a collective which waits for a healthy but failed peer; its sockets can
be shut down instead. Used by the floor, and offered to NVIDIA's wrapper, which would wait for
gloo's timeout without it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable
from contextlib import suppress


def connections() -> set[int]:
    """The descriptors that are connected TCP sockets, without those that only listen."""
    return {int(name) for name in os.listdir("/proc/self/fd") if _connected(int(name))}


def cut(links: Iterable[int]) -> None:
    """From another thread than the blocked one. Never a listening socket: gloo dies of that.

    Gloo closes the link to a dead peer by itself, hence the suppressed errors. Nobody may open a
    new descriptor in between, or it might get the number of a closed one and be cut too.
    """
    for fd in links:
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
            link.shutdown(socket.SHUT_RDWR)


def _connected(fd: int) -> bool:
    with suppress(OSError):  # the listing's own descriptor is closed by now
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as link:
                return link.family in (socket.AF_INET, socket.AF_INET6) and bool(link.getpeername())
    return False
