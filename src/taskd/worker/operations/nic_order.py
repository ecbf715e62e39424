"""The order to switch this rank's links to another interface, carried out in its own thread.

The framework (`torch/operations/nic_switch.py`) or Ascend's package (`ascend_calls.py`) does the
switch. The manager gets an answer even if that fails, because all ranks wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from taskd.model import messages as m
from taskd.worker.bus_connection import Send

log = logging.getLogger(__name__)

Switch = Callable[[m.SwitchNic], None]
"""Returns when the links are switched; raises if they are not."""


class NicSwitcher:
    """A subscriber of the process's bus connection."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._send: Send | None = None
        self._answer: m.NicSwitched | None = None
        self._uuid = ""

    def joined(self, send: Send) -> None:
        self._send = send
        self._send_answer()

    def received(self, body: m.Body) -> None:
        if not isinstance(body, m.SwitchNic) or not body.uuid:
            return
        if body.uuid == self._uuid:
            self._send_answer()  # A repeated order gets the same answer again.
            return
        self._uuid, self._answer = body.uuid, None
        threading.Thread(target=self._run, args=(body,), name="taskd-nic", daemon=True).start()

    def _run(self, order: m.SwitchNic) -> None:
        try:
            if len(order.ranks) != len(order.to_backup):
                raise ValueError(f"{len(order.ranks)} ranks but {len(order.to_backup)} directions")
            self._switch(order)
            ok = True
        except Exception as error:
            # What goes wrong here says it in its text; the caller's frames would not help.
            log.warning("links were not switched: %s: %s", type(error).__name__, error)
            log.debug("links were not switched", exc_info=True)
            ok = False
        if order.uuid == self._uuid:
            self._answer = m.NicSwitched(order.uuid, ok)
            self._send_answer()

    def _send_answer(self) -> None:
        if self._send is not None and self._answer is not None:
            self._send(self._answer)
