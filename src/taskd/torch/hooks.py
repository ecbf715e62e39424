"""What is seen of a training step, and only while something is recorded.

`install` puts all of this in place at the end of one step, `remove` takes it away at the end of
another; a script that is not recorded runs torch's own code untouched.

    communication   a kernel before torch's own in the dispatcher's table of `c10d`: it sees every
                    collective, also those that DDP starts from C++ (`collectives.py`)
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
from functools import wraps
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.dataloader import _BaseDataLoaderIter

from taskd.edge.clock import monotonic_ns, wall_ns
from taskd.model.profiling import Part
from taskd.torch.collectives import Collectives
from taskd.torch.device import Devices
from taskd.worker.recorder import Recorder
from taskd.worker.records import DEFAULT, Span

Undo = Callable[[], None]


class TorchHooks:
    """One a process; `glance.py` calls it between two steps."""

    def __init__(self) -> None:
        self._installed = ExitStack()
        self._parts = Part(0)
        self._recorder: Recorder | None = None
        self._offset = 0
        """From the monotonic clock, which never jumps, to the one that the records tell."""
        self._stepped_at = 0
        self._forwards: _Forwards | None = None
        self._devices: Devices | None = None

    def install(self, parts: Part, recorder: Recorder) -> None:
        self._parts, self._recorder = parts, recorder
        self._offset = wall_ns() - monotonic_ns()
        self._stepped_at = 0
        cuda: Any = torch.cuda
        self._devices = Devices(recorder, self._offset) if cuda.is_initialized() else None
        with ExitStack() as stack:
            collectives = Collectives(
                recorder, self._offset, bool(parts & Part.COMMUNICATION), self._devices
            )
            stack.callback(collectives.remove)
            if parts & Part.FORWARD:
                self._forwards = _Forwards(self._span)
                stack.callback(self._forwards.remove)
            stack.callback(_replace(_BaseDataLoaderIter, "__next__", self._timed_next))
            stack.callback(_replace(torch, "save", self._timed_save))
            dcp: Any = sys.modules.get("torch.distributed.checkpoint")
            if dcp is not None:
                stack.callback(_replace(dcp, "save", self._timed_save))
            self._installed = stack.pop_all()

    def remove(self) -> None:
        self._installed.close()
        self._recorder = self._forwards = self._devices = None

    @property
    def installed(self) -> bool:
        return self._recorder is not None

    def stepped(self, number: int) -> None:
        """The end of an optimizer's step."""
        recorder = self._recorder
        if recorder is None:
            return
        now, began = monotonic_ns(), self._stepped_at
        self._stepped_at = now
        if self._forwards is not None:
            self._forwards.settle()
        if began and self._parts & Part.STEP:
            self._span(f"step {number}", began, now)
        if self._devices is not None:
            self._devices.stepped(f"step {number}", bool(self._parts & Part.STEP))
        else:
            recorder.watch.stepped(now)

    def _span(self, name: str, start: int, end: int) -> None:
        if (recorder := self._recorder) is not None:
            offset, thread = self._offset, threading.get_native_id()
            recorder.add(
                Span(DEFAULT, name, start + offset, end + offset, recorder.next_id(), thread)
            )

    def _timed_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(iterator: Any) -> Any:
            start = monotonic_ns()
            try:
                return original(iterator)
            finally:
                end = monotonic_ns()
                if (recorder := self._recorder) is not None:
                    recorder.watch.turn.data += end - start
                    if self._parts & Part.DATA:
                        self._span("dataloader", start, end)

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
                end = monotonic_ns()
                if (recorder := self._recorder) is not None:
                    recorder.watch.turn.save += end - start
                    if self._parts & Part.SAVE:
                        self._span("save_checkpoint", start, end)

        return timed


class _Forwards:
    """Finds the outermost modules during one step, then watches their classes alone.

    Watching every module would cost two calls a layer; a hook in a module would go with it into
    the user's checkpoints. Code that torch has compiled would be compiled again on our account, so
    there only DDP's own forward is seen.
    """

    def __init__(self, span: Callable[[str, int, int], None]) -> None:
        self._record = span
        self._began = 0
        self._depth = 0
        self._roots: set[type] = set()
        self._seeking: list[Any] = []
        self._undo: list[Undo] = []
        if _has_compiled():
            self._undo.append(_replace(DistributedDataParallel, "forward", self._timed))
        else:
            self._seeking = [
                modules.register_module_forward_pre_hook(self._enter_any),
                modules.register_module_forward_hook(self._leave_any, always_call=True),
            ]

    def settle(self) -> None:
        """A step has ended: the classes that were called in it from outside are watched now."""
        if not self._seeking or not self._roots:
            return
        self._stop_seeking()
        self._undo += [_replace(root, "forward", self._timed) for root in self._roots]

    def remove(self) -> None:
        self._stop_seeking()
        for undo in self._undo:
            undo()

    def _stop_seeking(self) -> None:
        for handle in self._seeking:
            handle.remove()
        self._seeking = []
        self._depth = 0

    def _enter_any(self, module: Any, args: Any) -> None:
        if not self._depth:
            self._roots.add(type(module))
        self._enter()

    def _leave_any(self, module: Any, args: Any, output: Any) -> None:
        self._leave()

    def _enter(self) -> None:
        if not self._depth:
            self._began = monotonic_ns()
        self._depth += 1

    def _leave(self) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and (began := self._began):
            self._began = 0
            self._record("forward", began, monotonic_ns())

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._enter()
            try:
                return original(*args, **kwargs)
            finally:
                self._leave()

        return forward


def _has_compiled() -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))


def _replace(owner: Any, name: str, around: Callable[[Any], Any]) -> Undo:
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
