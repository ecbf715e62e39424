"""Takes spans from the training thread and writes them to disk in its own thread.

The training thread only appends to a bounded queue. Everything else (text, files, limits, the pace
for the agent) happens here, once per second and at the end of the process.
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

from taskd.worker.profiling.record_files import CannotWrite, RecordFiles
from taskd.worker.profiling.records import Span, lines
from taskd.worker.profiling.step_times import StepTimer

log = logging.getLogger(__name__)

MOST_SPANS = 200_000
"""Spans that wait for the disk or for the device. Beyond that, the oldest are lost."""
END_S = 10.0
"""How long the exit of the process waits for the last records."""


class PendingSpan(Protocol):
    """A span whose end is not known yet: a collective on a device."""

    recorded: bool
    """False: only the totals need it."""

    def finished(self) -> Span | None: ...


class Recorder:
    """Exists from switching on to switching off."""

    def __init__(
        self,
        files: RecordFiles,
        save_s: float,
        on_saved: Callable[[], None],
        most: int = MOST_SPANS,
    ) -> None:
        self.files = files
        self._save_s, self._on_saved, self._most = save_s, on_saved, most
        self._spans: deque[Span] = deque(maxlen=most)
        self._pending: deque[PendingSpan] = deque(maxlen=most)
        self.add = self._spans.append
        self.add_pending = self._pending.append
        self.next_id = itertools.count(1).__next__
        self.timer = StepTimer()
        self.source: Callable[[], list[str]] | None = None
        """Supplies further lines in the file format: Ascend's library."""
        self.problem = ""
        """Why records are lost; empty while they are written."""
        self._pid = os.getpid()
        self._over = threading.Event()
        self._saving = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="taskd-recorder", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def end(self) -> None:
        """Save all records soon, then stop. Only the exit of the process waits for that."""
        self._over.set()

    def close(self) -> None:
        """The same, and wait until it is done. A forked child has nothing to save."""
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
            self._on_saved()
        atexit.unregister(self.close)

    def _collect_finished(self) -> None:
        """In order: the collectives of a step come before its end."""
        while self._pending and (span := self._pending[0].finished()) is not None:
            pending = self._pending.popleft()
            if pending.recorded:
                self._spans.append(span)

    def _save(self) -> None:
        full = self._most in (len(self._spans), len(self._pending))
        self._collect_finished()
        spans: list[Span] = []
        while self._spans:
            spans.append(self._spans.popleft())
        text = [*lines(spans, self._pid), *(self.source() if self.source is not None else ())]
        if not text and not full:
            return
        try:
            left_out = self.files.append(text)
            problem = "the limit on profiling data is too small" if left_out else ""
        except CannotWrite as error:
            problem = str(error)
        if full and not problem:
            problem = f"more than {self._most} records at once: the oldest are lost"
        if problem and problem != self.problem:
            log.warning("profiling records are lost, training goes on: %s", problem)
        self.problem = problem
