"""Where the groups of one incident meet: a separate connection to the job's TCPStore.

Every incident gets a new connection and its own key prefix, so that no key of an older group is
ever read again, and cutting the connection frees every thread that waits on it. `all_groups.py`
opens a rendezvous, `transport.py` forms groups at it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store, TCPStore

from taskd.torch.groups import sockets

ANSWER_S = 5.0
"""How long the store may take for its first answer, before the connection is made again."""


class Rendezvous:
    """One incident's view of the store."""

    def __init__(self, address: str, prefix: str, timeout: timedelta) -> None:
        host, _, port = address.rpartition(":")
        before = sockets.inodes()
        with _silent_connections_cut(int(port), before):
            store = TCPStore(
                host.strip("[]"),
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=timeout,
            )
        self._connections = [one for one in sockets.scan(before) if one.peer_port == int(port)]
        self._tracked: list[socket.socket] = []
        self._is_aborted = False
        self.store = PrefixStore(prefix, store)
        self.prefix = prefix
        """Names the incident, and what the ranks meet for."""
        self.timeout = timeout

    def abort(self) -> None:
        """Free every thread that waits on the store. It cannot be used afterwards."""
        self._is_aborted = True
        for connection in self._connections:
            sockets.shut_down(connection)
        for one in self._tracked:
            _shut_down(one)

    def track(self, one: socket.socket) -> socket.socket:
        """Another socket of this incident, to be shut down with the rest."""
        self._tracked.append(one)
        if self._is_aborted:
            _shut_down(one)
        return one

    def local_host(self) -> str:
        """The address under which this process reaches the store, and peers reach it."""
        for connection in self._connections:
            return sockets.local_address(connection)
        return "127.0.0.1"


@contextmanager
def _silent_connections_cut(port: int, known: frozenset[int]) -> Iterator[None]:
    """torch waits for the first answer of the store without a limit. None comes when the process of
    the store is dead and its port still open, or when its machine is gone. torch then tries again,
    at the address that the name has by now, until its timeout."""
    done = threading.Event()

    def cut() -> None:
        waiting = set[sockets.SocketInfo]()
        while not done.wait(ANSWER_S):
            found = {one for one in sockets.scan(known) if one.peer_port == port}
            for one in found & waiting:
                sockets.shut_down(one)
            waiting = found

    cutting = threading.Thread(target=cut, name="taskd store connection", daemon=True)
    cutting.start()
    try:
        yield
    finally:
        done.set()
        cutting.join()


def _shut_down(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class CurrentStore(Store):
    """The store that torch sees: always the one of the current rendezvous.

    torch keeps its default store for the whole process and uses it in each `new_group`; ranks that
    stayed and ranks that joined later must then find the same one.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self._inner: Store = SoloStore(world_size)

    def point_at(self, inner: Store) -> None:
        self._inner = inner

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._inner.wait(keys)
        else:
            self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)


class SoloStore(CurrentStore):
    """For a replacement that has not met its peers yet: every barrier is already complete."""

    def __init__(self, world_size: int) -> None:
        Store.__init__(self)
        self._world_size = world_size
        self._inner = HashStore()

    def add(self, key: str, amount: int) -> int:
        return max(self._inner.add(key, amount), self._world_size)
