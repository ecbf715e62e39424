"""Records the parts of a training step, only while a recording is on.

`install` sets the hooks at the end of one step, `remove` removes them at the end of another;
without a recording a script runs torch's own code.

    communication   a kernel before torch's own in the dispatcher's table of `c10d`: it sees every
                    collective, also those that DDP starts from C++ (`collective_recorder.py`)
    step            from the end of an optimizer's step to the end of its next
    forward         the outermost modules: the classes of those called in the first step
    data loading    `next()` of a DataLoader's iterator
    checkpoints     `torch.save` and `torch.distributed.checkpoint.save`
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel

from taskd.model.profiling import Part
from taskd.runtime.clock import monotonic_ns
from taskd.torch import compat
from taskd.torch.profiling.collective_recorder import CollectiveRecorder
from taskd.torch.profiling.device_times import Devices
from taskd.worker.profiling.framework_hooks import OutermostCall, Timing, Undo, patch
from taskd.worker.profiling.recorder import Recorder


class TorchHooks:
    """One per process; `worker/profiling/profiler.py` calls it between two steps."""

    def __init__(self) -> None:
        self._installed = ExitStack()
        self._timing: Timing | None = None
        self._forwards: _Forwards | None = None
        self._devices: Devices | None = None

    def install(self, parts: Part, recorder: Recorder) -> None:
        compat.check_profiling()
        timing = self._timing = Timing(parts, recorder)
        cuda: Any = torch.cuda
        self._devices = Devices(recorder, timing.offset) if cuda.is_initialized() else None
        with ExitStack() as stack:
            stack.callback(CollectiveRecorder(timing, self._devices).remove)
            if parts & Part.FORWARD:
                self._forwards = _Forwards(self._forward)
                stack.callback(self._forwards.remove)
            stack.callback(patch(compat.data_loader_iterator(), "__next__", self._timed_next))
            stack.callback(patch(torch, "save", self._timed_save))
            dcp: Any = sys.modules.get("torch.distributed.checkpoint")
            if dcp is not None:
                stack.callback(patch(dcp, "save", self._timed_save))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        self._installed.close()
        self._timing = self._forwards = self._devices = None

    @property
    def installed(self) -> bool:
        return self._timing is not None

    def step_ended(self, number: int) -> None:
        """The end of an optimizer's step."""
        timing = self._timing
        if timing is None:
            return
        now, name = monotonic_ns(), f"step {number}"
        if self._forwards is not None:
            self._forwards.settle()
        timing.step_ended(name, now)
        if self._devices is not None:
            self._devices.step_ended(name, bool(timing.parts & Part.STEP))
        else:
            timing.recorder.timer.step_ended(now)

    def _forward(self, start: int, end: int) -> None:
        if (timing := self._timing) is not None:
            timing.span(Part.FORWARD, "forward", start, end)

    def _timed_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(iterator: Any) -> Any:
            start = monotonic_ns()
            try:
                return original(iterator)
            finally:
                if (timing := self._timing) is not None:
                    timing.data_loaded(start, monotonic_ns())

        return timed

    def _timed_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        busy = threading.local()

        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(busy, "inside", False):
                return original(*args, **kwargs)
            busy.inside = True
            start = monotonic_ns()
            try:
                return original(*args, **kwargs)
            finally:
                busy.inside = False
                if (timing := self._timing) is not None:
                    timing.checkpoint_saved(start, monotonic_ns())

        return timed


class _Forwards:
    """Finds the outermost modules during one step, then watches only their classes.

    Watching every module would cost two calls per layer; a hook in a module would be saved with it
    in the user's checkpoints. Compiled code would be compiled again because of our hooks, so there
    only DDP's own forward is recorded.
    """

    def __init__(self, on_forward: Callable[[int, int], None]) -> None:
        self._calls = OutermostCall(on_forward)
        self._roots: set[type] = set()
        self._seeking: list[Any] = []
        self._undo: list[Undo] = []
        if compat.has_compiled():
            self._undo.append(patch(DistributedDataParallel, "forward", self._calls.wrap))
        else:
            self._seeking = [
                modules.register_module_forward_pre_hook(self._enter_any),
                modules.register_module_forward_hook(self._leave_any, always_call=True),
            ]

    def settle(self) -> None:
        """A step has ended: from now on watch the classes that were called from outside in it."""
        if not self._seeking or not self._roots:
            return
        self._stop_seeking()
        self._undo += [patch(root, "forward", self._calls.wrap) for root in self._roots]

    def remove(self) -> None:
        self._stop_seeking()
        for undo in self._undo:
            undo()

    def _stop_seeking(self) -> None:
        for handle in self._seeking:
            handle.remove()
        self._seeking = []
        self._calls.depth = 0

    def _enter_any(self, module: Any, args: Any) -> None:
        if not self._calls.depth:
            self._roots.add(type(module))
        self._calls.enter()

    def _leave_any(self, module: Any, args: Any, output: Any) -> None:
        self._calls.leave()
