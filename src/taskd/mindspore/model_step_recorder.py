"""What is seen of a MindSpore step, and only while something is recorded.

    communication   the communication operators, as they are called from Python (`collectives.py`)
    step            from the end of one step to the end of the next (`glance.py`)
    forward         the outermost cells; not in a step that is compiled as a whole
    data loading    MindSpore's own mark "dataloader"
    checkpoints     MindSpore's own mark "save_checkpoint"

MindSpore hands its marks to Ascend's profiler alone and drops them elsewhere; ours stands before
that, so they are seen on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from mindspore import nn
from mindspore.experimental import optim
from mindspore.profiler.mstx import Mstx

from taskd.mindspore.communication_recorder import Collectives
from taskd.model.profiling import Part
from taskd.runtime.clock import monotonic_ns
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.spans import Outermost, Timing, Undo, replace

TRANSPARENT = (nn.Optimizer, optim.Optimizer, nn.TrainOneStepCell)
"""Cells that are no part of the model: a forward pass may lie within them."""


class MindSporeHooks:
    """One a process; `worker/profiling/step_end.py` calls it between two steps."""

    def __init__(self) -> None:
        self._installed = ExitStack()
        self._timing: Timing | None = None
        self._forwards: _Forwards | None = None

    def install(self, parts: Part, recorder: Recorder) -> None:
        timing = self._timing = Timing(parts, recorder)
        with ExitStack() as stack:
            if parts & Part.COMMUNICATION:
                stack.callback(Collectives(timing).remove)
            if parts & Part.FORWARD:
                self._forwards = _Forwards(self._forward)
                stack.callback(self._forwards.remove)
            for name, around in (("range_start", self._begun), ("range_end", self._ended)):
                stack.callback(_replace_static(Mstx, name, around))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        self._installed.close()
        self._timing = self._forwards = None

    @property
    def installed(self) -> bool:
        return self._timing is not None

    def stepped(self, number: int) -> None:
        timing = self._timing
        if timing is None:
            return
        now = monotonic_ns()
        if self._forwards is not None:
            self._forwards.settle()
        timing.stepped(f"step {number}", now)
        timing.recorder.watch.stepped(now)

    def _forward(self, start: int, end: int) -> None:
        if (timing := self._timing) is not None:
            timing.span(Part.FORWARD, "forward", start, end)

    def _begun(self, original: Callable[..., int]) -> Callable[..., int]:
        @wraps(original)
        def range_start(message: str, stream: Any = None, domain: str = "default") -> int:
            known = message if domain == "default" else ""
            return _Range(original(message, stream, domain), known, monotonic_ns())

        return range_start

    def _ended(self, original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def range_end(range_id: int, domain: str = "default") -> None:
            original(range_id, domain)
            timing = self._timing
            if timing is None or not isinstance(range_id, _Range):
                return
            if range_id.message == "dataloader":
                timing.loaded(range_id.start, monotonic_ns())
            elif range_id.message == "save_checkpoint":
                timing.saved(range_id.start, monotonic_ns())

        return range_end


class _Range(int):
    """MindSpore's number of a range, which knows when it began; for MindSpore it is the number."""

    message: str
    start: int

    def __new__(cls, number: int, message: str, start: int) -> _Range:
        made = super().__new__(cls, number)
        made.message, made.start = message, start
        return made


class _Forwards:
    """Finds the outermost cells during one step, then watches their classes alone."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._calls = Outermost(tell)
        self._roots: set[type] = set()
        self._undo: list[Undo] = []
        self._stop_seeking: Undo | None = replace(nn.Cell, "__call__", self._seek)

    def settle(self) -> None:
        """A step has ended: the classes that were called in it from outside are watched now."""
        if self._stop_seeking is None or not self._roots:
            return
        self._stop_seeking()
        self._stop_seeking = None
        self._calls.depth = 0
        self._undo = [replace(root, "__call__", self._calls.around) for root in self._roots]

    def remove(self) -> None:
        if self._stop_seeking is not None:
            self._stop_seeking()
        for undo in self._undo:
            undo()

    def _seek(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._calls.around(original)

        @wraps(original)
        def call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(cell, TRANSPARENT):
                return original(cell, *args, **kwargs)
            if not self._calls.depth:
                self._roots.add(type(cell))
            return timed(cell, *args, **kwargs)

        return call


def _replace_static(owner: type, name: str, around: Callable[[Any], Any]) -> Undo:
    """Like `replace`, for a function of a class that takes no instance."""
    kept = vars(owner)[name]
    replacement = staticmethod(around(getattr(owner, name)))
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, kept)

    return undo
