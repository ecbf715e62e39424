"""Collectives that a device carries out: the host is past them long before they are done.

NCCL and its like only note on the host that something is to be done. So the gate before the update
waits here until the device has done it, and a thread asks the library now and then whether it has
lost a peer: a device that waits for one tells nobody. `groups.py` owns one of these.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from taskd.torch.groups.works import Streamed

LOOK_S = 0.1
"""How often the library is asked; its own watch over itself is no faster."""


class Landing:
    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` finds out whether a library has lost a peer, and breaks the groups if so."""
        self._ask = ask
        self._launched: list[Streamed] = []
        """The collectives of this step that a device may still be at."""
        self._watch: threading.Thread | None = None
        self._never = threading.Event()

    def launch(self, work: Streamed) -> None:
        self._launched.append(work)
        if self._watch is None:
            self._watch = threading.Thread(target=self._look, name="taskd-devices", daemon=True)
            self._watch.start()

    def land(self) -> bool:
        """Wait for the device to do them all, or for an abort to free it. False: none there."""
        if not self._launched:
            return False
        for work in self._launched:
            work.wait()
        self._launched.clear()
        if torch.accelerator.is_available():
            torch.accelerator.current_stream().synchronize()
        self._ask()
        return True

    def forget(self) -> None:
        """The step has ended."""
        self._launched.clear()

    def _look(self) -> None:
        while not self._never.wait(LOOK_S):
            self._ask()
