"""The mark in the job's store that an attempt has begun: who starts from now on joins the others.

The store is a process that can be lost like any other, and the one in its place knows nothing. So
whoever stands still in an incident looks whether the mark is there, and sets it again; and a
replacement waits a little for it.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

log = logging.getLogger(__name__)

KEY = "begun"
PATIENCE = timedelta(seconds=3)


class Begun:
    def __init__(self, address: str, attempt: str) -> None:
        self._address, self._attempt = address, attempt
        self.store = self._connect()

    def _connect(self) -> PrefixStore:
        host, _, port = self._address.rpartition(":")
        store = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False)
        return PrefixStore(f"attempt/{self._attempt}/", store)

    def is_set(self, is_expected: bool) -> bool:
        """`is_expected`: this process takes the place of one that was lost."""
        if self.store.check([KEY]):
            return True
        if not is_expected:
            return False
        try:
            self.store.wait([KEY], PATIENCE)
        except RuntimeError:
            log.warning("this rank was started alone, but the job has not begun: it starts as all")
            return False
        return True

    def set(self) -> None:
        self.store.set(KEY, "1")

    def renew(self) -> None:
        """At leisure: nobody waits for it but a replacement that cannot know better."""
        threading.Thread(target=self._renew, name="taskd-begun", daemon=True).start()

    def _renew(self) -> None:
        try:
            if self.store.check([KEY]):
                return
        except RuntimeError:
            log.info("the store was lost; the new one is told that the job has begun")
        try:
            self.store = self._connect()
            self.set()
        except RuntimeError as error:
            log.warning("the store cannot be told that the job has begun: %s", error)
