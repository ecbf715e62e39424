"""The mark in the job's store that an attempt has started: ranks that start later join the others.

The store is a process that can be lost like any other, and its successor is empty. So every rank
that is parked in an incident checks whether the mark is there and sets it again; and a replacement
waits a little for it.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

log = logging.getLogger(__name__)

KEY = "begun"
PATIENCE = timedelta(seconds=3)


class StartMark:
    """The mark of one attempt."""

    def __init__(self, address: str, attempt: str) -> None:
        self._address, self._attempt = address, attempt
        self.store = self._connect()

    def _connect(self) -> PrefixStore:
        host, _, port = self._address.rpartition(":")
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

    def set(self) -> None:
        self.store.set(KEY, "1")

    def renew(self) -> None:
        """Set it again, in a thread: only a replacement on a new store needs it."""
        threading.Thread(target=self._renew, name="taskd-start-mark", daemon=True).start()

    def _renew(self) -> None:
        try:
            if self.store.check([KEY]):
                return
        except RuntimeError:
            log.info("store was lost: setting the start mark in the new one")
        try:
            self.store = self._connect()
            self.set()
        except RuntimeError as error:
            log.warning("cannot set the start mark in the store: %s", error)
