"""Connections whose peer has not yet said what it wants, or proved that it may have it.

A stranger may open any number of them and say nothing, or say it very slowly. So only a few may
wait at once, and the next one replaces the oldest. For servers with a thread for each connection.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress

MOST_WAITING = 64


class WaitingConnections:
    def __init__(self) -> None:
        self._waiting: deque[socket.socket] = deque()
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            self._waiting.append(connection)
            if len(self._waiting) > MOST_WAITING:
                shut_down(self._waiting.popleft())

    def remove(self, connection: socket.socket) -> None:
        """It waits no longer: it is served, or refused."""
        with self._lock, suppress(ValueError):
            self._waiting.remove(connection)

    def drop_all(self) -> None:
        with self._lock:
            for connection in self._waiting:
                shut_down(connection)


def shut_down(one: socket.socket) -> None:
    """Free every thread that waits on it."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
