"""Takes spans from the training thread and brings them to disk in a thread of its own.

The training thread's part is one append to a bounded queue. Everything else (text, files, limits,
the pace for the agent) happens here, once a second, and once more at the end of the process.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from taskd.worker.profiling.pace import Stopwatch
from taskd.worker.profiling.record_files import CannotKeep, Shelf
from taskd.worker.profiling.records import Span, lines

log = logging.getLogger(__name__)

MOST_SPANS = 200_000
"""Waiting for the disk, or for the device. When there are more, the oldest are lost."""
END_S = 10.0
"""How long the end of the process waits for the last records."""


class Later(Protocol):
    """A span whose end is not known yet: a collective on a device."""

    recorded: bool
    """False: only the pace needs it."""

    def settled(self) -> Span | None: ...


class Recorder:
    """From switching on to switching off."""

    def __init__(
        self, shelf: Shelf, save_s: float, told: Callable[[], None], most: int = MOST_SPANS
    ) -> None:
        self.shelf = shelf
        self._save_s, self._told, self._most = save_s, told, most
        self._spans: deque[Span] = deque(maxlen=most)
        self._later: deque[Later] = deque(maxlen=most)
        self.add = self._spans.append
        self.add_later = self._later.append
        self.next_id = itertools.count(1).__next__
        self.watch = Stopwatch()
        self.source: Callable[[], list[str]] | None = None
        """Where further lines come from, ready to be kept: Ascend's library."""
        self.problem = ""
        """Why records are not kept; empty while they are."""
        self._pid = os.getpid()
        self._over = threading.Event()
        self._saving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="taskd-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def end(self) -> None:
        """Save what there is, soon, and stop. Only the end of the process waits for that."""
        self._over.set()

    def close(self) -> None:
        """The same, and wait until it is done. In a forked child there is nothing to save."""
        self.end()
        if os.getpid() == self._pid:
            self._thread.join(END_S)

    def flush(self) -> None:
        """Save now, in the caller's thread."""
        with self._saving:
            self._save()

    def _run(self) -> None:
        over = False
        while not over:
            over = self._over.wait(self._save_s)
            self.flush()
            self._told()
        atexit.unregister(self.close)

    def _settle(self) -> None:
        """In order: a step's collectives come before its end."""
        while self._later and (span := self._later[0].settled()) is not None:
            waited = self._later.popleft()
            if waited.recorded:
                self._spans.append(span)

    def _save(self) -> None:
        full = self._most in (len(self._spans), len(self._later))
        self._settle()
        taken: list[Span] = []
        while self._spans:
            taken.append(self._spans.popleft())
        kept = [*lines(taken, self._pid), *(self.source() if self.source is not None else ())]
        if not kept and not full:
            return
        try:
            left_out = self.shelf.keep(kept)
            problem = "the limit on profiling data is too small" if left_out else ""
        except CannotKeep as error:
            problem = str(error)
        if full and not problem:
            problem = f"more than {self._most} records at once: the oldest are lost"
        if problem and problem != self.problem:
            log.warning("profiling records are lost, training goes on: %s", problem)
        self.problem = problem
