"""What the hooks of any framework have in common: spans, the outermost call, borrowed functions.

`torch/profiling/step_recorder.py` and `mindspore/model_step_recorder.py` say where to look; what
is seen becomes records (`recorder.py`) and, for the comparison between ranks, sums (`pace.py`).
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
    """From switching on to switching off. Times are taken by a clock that never jumps."""

    def __init__(self, parts: Part, recorder: Recorder) -> None:
        self.parts, self.recorder = parts, recorder
        self.offset = wall_ns() - monotonic_ns()
        """From that clock to the one that the records tell."""
        self._stepped_at = 0

    def span(self, part: Part, name: str, start: int, end: int, domain: str = DEFAULT) -> None:
        if self.parts & part:
            self.add(domain, name, start, end, threading.get_native_id())

    def add(self, domain: str, name: str, start: int, end: int, thread: int) -> None:
        recorder, offset = self.recorder, self.offset
        recorder.add(Span(domain, name, start + offset, end + offset, recorder.next_id(), thread))

    def stepped(self, name: str, now: int) -> None:
        """From the end of one step to the end of the next."""
        began, self._stepped_at = self._stepped_at, now
        if began:
            self.span(Part.STEP, name, began, now)

    def loaded(self, start: int, end: int) -> None:
        self.recorder.watch.turn.data += end - start
        self.span(Part.DATA, "dataloader", start, end)

    def saved(self, start: int, end: int) -> None:
        self.recorder.watch.turn.save += end - start
        self.span(Part.SAVE, "save_checkpoint", start, end)


class Outermost:
    """Of calls within calls, the outermost is the one that is told."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
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
            self._tell(began, monotonic_ns())

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return original(*args, **kwargs)
            finally:
                self.leave()

        return timed


def replace(owner: Any, name: str, around: Callable[[Any], Any]) -> Undo:
    """Put something around a function of a module or class. Returns how to take it away again."""
    inherited = name not in vars(owner)
    original = getattr(owner, name)
    replacement = around(original)
    setattr(owner, name, replacement)

    def undo() -> None:
        # Somebody may have put something of his own around ours: then it stays, and does nothing.
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo
