"""Copies of the set-up's results, for the loss of the node whose store has them.

Each rank keeps its own results in memory, and when its first step begins it reads those of one rank
of the next node from the store. After the loss of the store's node, the survivors write everything
that they keep into the next store, before a replacement reads it. So the results of a rank are lost
only together with two nodes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

log = logging.getLogger(__name__)

AWAIT_PEER = timedelta(minutes=10)
"""How long another rank may take to come to its first step."""
AWAIT_COPY = timedelta(seconds=3)


class SetupCopies:
    def __init__(self, rank: int, peer: int, connect: Callable[[], Store]) -> None:
        """`peer`: the rank whose results this one keeps, too."""
        self._rank, self._peer, self._connect = rank, peer, connect
        self._own: dict[str, bytes] = {}
        self._of_peer: dict[str, bytes] = {}

    def keep(self, key: str, sealed: bytes) -> None:
        self._own[key] = sealed

    def await_own(self, store: Store) -> None:
        """In a replacement: wait until the results of its predecessor are complete."""
        try:
            store.wait([_index(self._rank)], AWAIT_COPY)
        except RuntimeError:
            log.warning("the results of this rank's set-up are not complete, or were lost")

    def set_up_done(self, store: Store) -> None:
        """The first step begins: all results of this rank are known."""
        try:
            _write_index(store, self._rank, self._own)
        except RuntimeError as error:
            log.warning("cannot save the results of the set-up for a replacement: %s", error)
        self.copy_peer()

    def copy_peer(self) -> None:
        """In a thread, with a connection of its own: training does not wait for it."""
        threading.Thread(target=self._copy_peer, name="taskd-setup-copies", daemon=True).start()

    def _copy_peer(self) -> None:
        try:
            store = self._connect()
            store.wait([_index(self._peer)], AWAIT_PEER)
            keys = filter(None, store.get(_index(self._peer)).decode().split("\n"))
            self._of_peer = {key: store.get(key) for key in keys}
        except RuntimeError as error:
            log.info("no copy of the set-up of rank %d: %s", self._peer, error)

    def publish(self, store: Store) -> None:
        """Write everything into a store that replaces a lost one."""
        for rank, results in ((self._rank, self._own), (self._peer, self._of_peer)):
            for key, sealed in results.items():
                store.set(key, sealed)  # type: ignore[arg-type]
            if results:
                _write_index(store, rank, results)


def _write_index(store: Store, rank: int, results: dict[str, bytes]) -> None:
    """Written last: who finds it finds all results."""
    store.set(_index(rank), "\n".join(results))


def _index(rank: int) -> str:
    return f"setup/{rank}/index"
