"""The mark in the job's store that an attempt has started: ranks that start later join the others.

The store is a process that can be lost like any other, and its successor is empty. So every rank
that is parked in an incident checks whether the mark is there and sets it again; and a replacement
waits a little for it. If the store was lost with its node, the next plan names the store of another
node, or the new one of the same node at the same address, and all ranks move to it. A rank that has
to connect again cannot know whether it finds the same store, so it fills it with what it keeps.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore

log = logging.getLogger(__name__)

KEY, ARRIVED = "begun", "arrived"
PATIENCE = timedelta(seconds=3)


class StartMark:
    """The mark of one attempt."""

    def __init__(self, address: str, attempt: str) -> None:
        self._address, self._attempt = address, attempt
        self.store = self.connect()
        self.publish: Callable[[Store], None] = lambda store: None
        """Fills a new store before it gets the mark."""

    @property
    def address(self) -> str:
        """host:port of the store."""
        return self._address

    def connect(self) -> PrefixStore:
        """A further connection to the store, under the prefix of the attempt."""
        return self._connect_to(self._address)

    def _connect_to(self, address: str) -> PrefixStore:
        host, _, port = address.rpartition(":")
        store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False)
        return PrefixStore(f"attempt/{self._attempt}/", store)

    def is_set(self, is_expected: bool) -> bool:
        """`is_expected`: this process replaces one that was lost."""
        if self.store.check([KEY]):
            return True
        if not is_expected:
            return False
        try:
            self.store.wait([KEY], PATIENCE)
        except RuntimeError:
            log.warning(
                "this rank was started as a replacement, but the job has not started: "
                "it starts together with all other ranks"
            )
            return False
        return True

    def arrive(self, rank: int, world_size: int) -> None:
        """This rank starts together with the others; the last one to arrive sets the mark.

        Not the first one: groups over NCCL do not wait for all ranks, and a rank that is slower
        would take the job for a running one. A rank that starts twice counts once.
        """
        is_first = self.store.add(f"{ARRIVED}/{rank}", 1) == 1
        if is_first and self.store.add(ARRIVED, 1) >= world_size:
            self.set()

    def set(self) -> None:
        self.store.set(KEY, "1")

    def meet_at(self, address: str) -> bool:
        """Use the store at this address from now on, which may be a new one. True: it is.

        Raises RuntimeError if it does not answer.
        """
        if address == self._address and self._is_connected():
            return False
        self._use(address, self._connect_to(address))
        return True

    def _is_connected(self) -> bool:
        """To the same process as before: a new one has neither the mark nor this connection."""
        try:
            return self.store.check([KEY])
        except RuntimeError:
            return False

    def _use(self, address: str, store: PrefixStore) -> None:
        self.publish(store)
        self._address, self.store = address, store
        self.set()

    def renew(self) -> None:
        """Set it again, in a thread: only a replacement on a new store needs it."""
        threading.Thread(target=self._renew, name="taskd-start-mark", daemon=True).start()

    def _renew(self) -> None:
        if self._node_is_gone():
            return  # the next plan names another store
        if self._is_connected():
            return
        log.info("store was lost: setting the start mark in the new one")
        address = self._address
        try:
            store = self._connect_to(address)
            if address == self._address:  # it has not moved meanwhile
                self._use(address, store)
        except RuntimeError as error:
            log.warning("cannot set the start mark in the store: %s", error)

    def _node_is_gone(self) -> bool:
        """The launcher of the store's node holds its port, also while the store is started again.

        torch would write the stack of its own error for a store that is gone.
        """
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), PATIENCE.seconds).close()
        except OSError:
            return True
        return False
