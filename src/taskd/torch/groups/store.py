"""Where the groups of one incident meet: a connection of our own to the job's TCPStore.

Every incident gets a new connection and a prefix of its own, so that no key of an older group is
ever read again, and cutting the connection frees whoever waits at it. `groups.py` opens meetings,
`transport.py` forms groups at them.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from taskd.torch.groups import sockets


class Meeting:
    """One incident's view of the store."""

    def __init__(self, address: str, place: str, timeout: timedelta) -> None:
        host, _, port = address.rpartition(":")
        before = sockets.inodes()
        store = TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout
        )
        links = [one for one in sockets.scan(before) if one.peer_port == int(port)]
        self._links, self._more = links, list[socket.socket]()
        self._is_cut = False
        self.store = PrefixStore(place, store)
        self.timeout = timeout

    def cut(self) -> None:
        """Free whoever waits at the store. It answers nobody afterwards."""
        self._is_cut = True
        for link in self._links:
            sockets.cut(link)
        for more in self._more:
            _shut(more)

    def guard(self, more: socket.socket) -> socket.socket:
        """Another socket of this incident, to be cut with the rest."""
        self._more.append(more)
        if self._is_cut:
            _shut(more)
        return more

    def my_host(self) -> str:
        """The address under which this process reaches the store, and peers reach it."""
        for link in self._links:
            return sockets.host(link)
        return "127.0.0.1"


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


class SharedStore(Store):
    """The store that torch sees: always the one of the current meeting.

    torch keeps its default store for life and uses it for each `new_group`; ranks that stayed and
    ranks that came later must then find the same one.
    """

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world = world
        self._inner: Store = AloneStore(world)

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


class AloneStore(SharedStore):
    """For a replacement that has met nobody yet: every barrier is already complete."""

    def __init__(self, world: int) -> None:
        Store.__init__(self)
        self._world = world
        self._inner = HashStore()

    def add(self, key: str, amount: int) -> int:
        return max(self._inner.add(key, amount), self._world)
