"""Records every collective of the process while a recording is on, wherever it is started from.

torch's process groups call their backends through the dispatcher (`c10d::allreduce_` and so on). A
kernel of ours, registered for a dispatch key that comes before the device's own, sees the call,
passes it on, and records when its future is done. Removing it restores the dispatcher's table.

Waits in Python code are timed as well; those inside C++ appear as the end of the step
(`worker/profiling/step_times.py`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from taskd.model.profiling import Part
from taskd.runtime.clock import monotonic_ns
from taskd.torch import compat
from taskd.torch.groups import works
from taskd.torch.profiling.device_times import Devices
from taskd.worker.profiling.framework_hooks import Timing
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.records import COMMUNICATION, collective

log = logging.getLogger(__name__)

OPERATIONS = (
    "allreduce_",
    "allreduce_coalesced_",
    "broadcast_",
    "reduce_",
    "allgather_",
    "_allgather_base_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "reduce_scatter_tensor_coalesced_",
    "gather_",
    "scatter_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "send",
    "recv_",
    "recv_any_source_",
)
BLOCKING = {"broadcast", "barrier"}
"""The caller waits for these at once, as DDP for its buffers before it computes."""
BEFORE_DEVICES = "Autograd"

_LIBRARY: Any = torch.library.Library
_WORK: Any = dist.Work
_GROUP: Any = dist.ProcessGroup


class CollectiveRecorder:
    """Installed when it is created."""

    def __init__(self, timing: Timing, devices: Devices | None) -> None:
        self._timing, self._devices = timing, devices
        self._recorder = timing.recorder
        self._recorded = bool(timing.parts & Part.COMMUNICATION)
        self._library = _LIBRARY("c10d", "IMPL")
        for name in OPERATIONS:
            if hasattr(torch.ops.c10d, name):
                kernel = self._kernel(name)
                self._library.impl(name, kernel, BEFORE_DEVICES, with_keyset=True)
        self._waits = [_TimedWait(owner, timing.recorder) for owner in (dist.Work, works.GlooWork)]

    def remove(self) -> None:
        compat.remove_kernels(self._library)
        for timed in self._waits:
            timed.remove()

    def _kernel(self, name: str) -> Callable[..., Any]:
        operation: Any = getattr(torch.ops.c10d, name).default
        places = compat.argument_positions(operation)
        group_at, async_at = places["process_group"], places.get("async_op", len(places))
        plain, recorded = name.strip("_"), self._recorded

        def kernel(keyset: Any, *args: Any) -> Any:
            turn, start = self._recorder.timer.current, monotonic_ns()
            tensor = _first_tensor(args[0])
            devices = self._devices if tensor is not None and tensor.is_cuda else None
            begun = devices.begin() if devices is not None else None
            blocking = plain in BLOCKING or (async_at < len(args) and not args[async_at])
            turn.collectives += 1
            if devices is None and not blocking:
                turn.launch(start)
            result = operation.redispatch(compat.below_autograd(keyset), *args)
            try:
                group = _GROUP.unbox(args[group_at])
                work = _WORK.unbox(result[-1] if isinstance(result, tuple) else result)
                label = collective(
                    plain,
                    group.group_name,
                    compat.sequence_number(group),
                    0 if tensor is None else tensor.numel(),
                    "" if tensor is None else str(tensor.dtype).removeprefix("torch."),
                )
                thread = threading.get_native_id()
                if devices is not None and begun is not None:
                    devices.end(begun, work, label, recorded)
                    return result

                def done(_: Any) -> None:
                    end = monotonic_ns()
                    if blocking:
                        turn.wait(start, end)
                    else:
                        turn.end(end)
                    if recorded:
                        self._timing.add(COMMUNICATION, label, start, end, thread)

                work.get_future().add_done_callback(done)
            except RuntimeError as error:
                # Point-to-point works have no future, so their end is not known.
                log.debug("%s is not recorded: %s", plain, error)
            return result

        return kernel


class _TimedWait:
    """Replaces `wait` of a class of works by one that measures the time."""

    def __init__(self, owner: Any, recorder: Recorder) -> None:
        self._owner, self._original = owner, owner.__dict__["wait"]
        original = self._original

        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            turn, start = recorder.timer.current, monotonic_ns()
            try:
                return original(work, *args, **kwargs)
            finally:
                turn.wait(start, monotonic_ns())

        self._ours = wait
        owner.wait = wait

    def remove(self) -> None:
        if self._owner.__dict__.get("wait") is self._ours:
            self._owner.wait = self._original


def _first_tensor(value: Any) -> torch.Tensor | None:
    while isinstance(value, list | tuple):
        if not value:
            return None
        value = value[0]
    return value if isinstance(value, torch.Tensor) else None
