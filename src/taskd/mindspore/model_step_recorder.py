"""Records the parts of a MindSpore step. Installed only while something is recorded.

    communication   operators that are called from Python (`communication_recorder.py`)
    step            from the end of one step to the end of the next
    forward         the outermost cells; not in a step that is compiled as a whole
    data loading    MindSpore's own mark "dataloader"
    checkpoints     MindSpore's own mark "save_checkpoint"

MindSpore passes its marks to Ascend's profiler only and drops them on other devices. The hooks here
see them before that, so they work on every device.
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
from taskd.worker.profiling.framework_hooks import OutermostCall, Timing, Undo, patch
from taskd.worker.profiling.recorder import Recorder

TRANSPARENT = (nn.Optimizer, optim.Optimizer, nn.TrainOneStepCell)
"""Cells that are not part of the model but may contain a forward pass."""


class MindSporeHooks:
    """One per process; `StepEndHook` of `worker/profiling/profiler.py` calls it."""

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
            for name, wrap in (("range_start", self._begun), ("range_end", self._ended)):
                stack.callback(_patch_static(Mstx, name, wrap))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        self._installed.close()
        self._timing = self._forwards = None

    @property
    def installed(self) -> bool:
        return self._timing is not None

    def step_ended(self, number: int) -> None:
        timing = self._timing
        if timing is None:
            return
        now = monotonic_ns()
        if self._forwards is not None:
            self._forwards.step_ended()
        timing.step_ended(f"step {number}", now)
        timing.recorder.timer.step_ended(now)

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
                timing.data_loaded(range_id.start, monotonic_ns())
            elif range_id.message == "save_checkpoint":
                timing.checkpoint_saved(range_id.start, monotonic_ns())

        return range_end


class _Range(int):
    """MindSpore's number of a range, with its message and its start. MindSpore sees the number."""

    message: str
    start: int

    def __new__(cls, number: int, message: str, start: int) -> _Range:
        created = super().__new__(cls, number)
        created.message, created.start = message, start
        return created


class _Forwards:
    """Finds the outermost cells during one step, then times only their classes."""

    def __init__(self, report: Callable[[int, int], None]) -> None:
        self._calls = OutermostCall(report)
        self._roots: set[type] = set()
        self._undo: list[Undo] = []
        self._stop_search: Undo | None = patch(nn.Cell, "__call__", self._search)

    def step_ended(self) -> None:
        """From now on, time only the classes whose calls were outermost in this step."""
        if self._stop_search is None or not self._roots:
            return
        self._stop_search()
        self._stop_search = None
        self._calls.depth = 0
        self._undo = [patch(root, "__call__", self._calls.wrap) for root in self._roots]

    def remove(self) -> None:
        if self._stop_search is not None:
            self._stop_search()
        for undo in self._undo:
            undo()

    def _search(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._calls.wrap(original)

        @wraps(original)
        def call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(cell, TRANSPARENT):
                return original(cell, *args, **kwargs)
            if not self._calls.depth:
                self._roots.add(type(cell))
            return timed(cell, *args, **kwargs)

        return call


def _patch_static(owner: type, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Like `patch`, for a static method."""
    original = vars(owner)[name]
    replacement = staticmethod(wrap(getattr(owner, name)))
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is replacement:
            setattr(owner, name, original)

    return undo
