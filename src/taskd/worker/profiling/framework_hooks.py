"""Tools for the profiling hooks of all frameworks: spans, outermost calls, patched functions.

`torch/profiling/step_recorder.py` and `mindspore/model_step_recorder.py` decide where to hook in.
What they measure becomes records (`recorder.py`) and totals for the comparison between ranks
(`step_times.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from taskd.model.profiling import Part
from taskd.runtime.clock import monotonic_ns, wall_ns
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.records import DEFAULT, Span

Undo = Callable[[], None]


class Timing:
    """Records spans from switching on to switching off. Times come from the monotonic clock."""

    def __init__(self, parts: Part, recorder: Recorder) -> None:
        self.parts, self.recorder = parts, recorder
        self.offset = wall_ns() - monotonic_ns()
        """From the monotonic clock to the wall clock of the records."""
        self._step_ended_at = 0

    def span(self, part: Part, name: str, start: int, end: int, domain: str = DEFAULT) -> None:
        if self.parts & part:
            self.add(domain, name, start, end, threading.get_native_id())

    def add(self, domain: str, name: str, start: int, end: int, thread: int) -> None:
        recorder, offset = self.recorder, self.offset
        recorder.add(Span(domain, name, start + offset, end + offset, recorder.next_id(), thread))

    def step_ended(self, name: str, now: int) -> None:
        """Record the step that began when the previous one ended."""
        began, self._step_ended_at = self._step_ended_at, now
        if began:
            self.span(Part.STEP, name, began, now)

    def data_loaded(self, start: int, end: int) -> None:
        self.recorder.timer.current.data += end - start
        self.span(Part.DATA, "dataloader", start, end)

    def checkpoint_saved(self, start: int, end: int) -> None:
        self.recorder.timer.current.save += end - start
        self.span(Part.SAVE, "save_checkpoint", start, end)


class OutermostCall:
    """Measures nested calls and reports only the outermost one: its start and its end."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._report = report
        self._began = 0
        self.depth = 0

    def enter(self) -> None:
        if not self.depth:
            self._began = monotonic_ns()
        self.depth += 1

    def leave(self) -> None:
        self.depth = max(0, self.depth - 1)
        if not self.depth and (began := self._began):
            self._began = 0
            self._report(began, monotonic_ns())

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        return timed


def patch(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Replace a function of a module or class by `wrap(function)`. Returns how to undo it."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    replacement = wrap(original)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Another library may have patched on top of ours. Then ours stays, and records nothing.
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo
