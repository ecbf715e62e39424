"""One line on the terminal of `taskd run` for each incident, as soon as it is over."""

from __future__ import annotations

import os
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Any

from taskd.core.agent import incident_text
from taskd.runtime.plain_text import one_line

STDERR = 2
MOST_WAITING = 100
"""Lines that a terminal may leave unread; further ones are dropped."""


class IncidentLines:
    """A thread writes them: a terminal that is stopped must not stop the manager."""

    def __init__(self, target: int = STDERR) -> None:
        self._target = target
        self._lines: Queue[str] = Queue(MOST_WAITING)
        self._interrupted: list[dict[str, Any]] = []
        Thread(target=self._write, name="incident-lines", daemon=True).start()

    def show(self, incident: dict[str, Any]) -> None:
        """The last incident of a job that fails is left out: the launcher shows it at once."""
        group = [*self._interrupted, incident]
        self._interrupted = group if incident["outcome"] == incident_text.SUPERSEDED else []
        if not self._interrupted and incident["outcome"] != "ended":
            with suppress(Full):
                self._lines.put_nowait(incident_text.line(group, with_phases=False))

    def _write(self) -> None:
        while True:
            line = f"taskd: {one_line(self._lines.get())}\n"
            with suppress(OSError):
                os.write(self._target, line.encode(errors="backslashreplace"))
