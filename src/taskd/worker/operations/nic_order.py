"""The order to move this rank's links to another interface: heard, obeyed aside, answered.

How they move is the framework's affair (`torch/operations/nic_switch.py`) or the vendor's
(`ascend.py`). Whatever goes wrong there, the manager gets its answer: all ranks wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from taskd.model import messages as m
from taskd.worker.bus_connection import Say

log = logging.getLogger(__name__)

Switch = Callable[[m.SwitchNic], None]
"""Returns when the links have moved, raises when they have not."""


class NicSwitcher:
    """A rider on the process's line to the manager (`line.py`)."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._say: Say | None = None
        self._answer: m.NicSwitched | None = None
        self._uuid = ""

    def joined(self, say: Say) -> None:
        self._say = say
        self._tell()

    def heard(self, body: m.Body) -> None:
        if not isinstance(body, m.SwitchNic) or not body.uuid:
            return
        if body.uuid == self._uuid:
            self._tell()  # said again, an order is answered again
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
            text = f"{type(error).__name__}: {error}"
            log.warning("the links stay where they are: %s", text, exc_info=True)
            ok = False
        if order.uuid == self._uuid:
            self._answer = m.NicSwitched(order.uuid, ok)
            self._tell()

    def _tell(self) -> None:
        if self._say is not None and self._answer is not None:
            self._say(self._answer)
