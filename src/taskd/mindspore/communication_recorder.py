"""Records MindSpore's communication operators that are called from Python.

Both kinds are covered: the operators (`ops.AllReduce()`) and the functions (`mint.distributed`,
`ops.communication`). A call only puts the operator into MindSpore's queue; the end is known when
the tensor that it fills is ready. A separate thread waits for that tensor, so the script never
waits longer than without profiling. Operators inside compiled graphs are not called from Python
and are not recorded.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

from mindspore import Tensor, mint
from mindspore.communication import comm_func as older
from mindspore.ops.function import comm_func as newer
from mindspore.ops.operations import comm_ops
from mindspore.ops.primitive import Primitive

from taskd.runtime.clock import monotonic_ns
from taskd.worker.profiling.framework_hooks import Timing, patch
from taskd.worker.profiling.records import COMMUNICATION, collective

log = logging.getLogger(__name__)

OPERATORS = (
    "AllReduce",
    "AllGather",
    "AllGatherV",
    "AlltoAll",
    "AlltoAllV",
    "Barrier",
    "BatchISendIRecv",
    "Broadcast",
    "CollectiveGather",
    "CollectiveScatter",
    "NeighborExchange",
    "Receive",
    "Reduce",
    "ReduceScatter",
    "ReduceScatterV",
    "Send",
)
FUNCTIONS = ("dist_comm_", "inner_comm_")
"""Prefixes of the inner functions that the public communication functions call."""
WORLD = "world"
MOST_WAITING = 1000
"""Operators whose end is awaited. Beyond that, the newest are not recorded."""


class _Begun(NamedTuple):
    name: str
    start: int
    thread: int
    filled: Any


class Collectives:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._counts: Counter[str] = Counter()
        self._waiting: queue.SimpleQueue[_Begun | None] = queue.SimpleQueue()
        self._installed = ExitStack()
        for owner, name, plain in _targets():
            self._installed.callback(patch(owner, name, partial(self._wrap, plain)))
        threading.Thread(target=self._wait, name="taskd-collectives", daemon=True).start()

    def remove(self) -> None:
        self._installed.close()
        self._waiting.put(None)

    def _wrap(self, plain: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            result = original(*args, **kwargs)
            self._begun(plain, start, args, result)
            return result

        return call

    def _begun(self, plain: str, start: int, args: tuple[Any, ...], result: Any) -> None:
        self._timing.recorder.timer.current.collectives += 1
        filled = _first_tensor(result)
        given = _first_tensor(args)
        if filled is None:
            filled = given
        group = _group(args)
        self._counts[group] += 1
        size, dtype = (0, "") if given is None else (given.size, str(given.dtype).lower())
        name = collective(plain, group, self._counts[group], size, dtype)
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(_Begun(name, start, threading.get_native_id(), filled))

    def _wait(self) -> None:
        while (begun := self._waiting.get()) is not None:
            try:
                if begun.filled is not None:
                    begun.filled.data_sync(True)
            except (
                RuntimeError
            ) as error:  # The operator has failed; the script gets the same error.
                log.debug("%s is not recorded: it failed: %s", begun.name, error)
                continue
            self._timing.add(COMMUNICATION, begun.name, begun.start, monotonic_ns(), begun.thread)


def _targets() -> Iterator[tuple[Any, str, str]]:
    """The owner, the attribute, and the name in the records of all functions to patch."""
    for operator in OPERATORS:
        if (owner := getattr(comm_ops, operator, None)) is not None:
            yield owner, "__call__", operator.lower()
    for module in (mint.distributed.distributed, newer, older):
        for name in [name for name in vars(module) if name.startswith(FUNCTIONS)]:
            plain = name.removesuffix("_op").partition("_comm_")[2].replace("_", "")
            yield module, name, plain


def _group(args: tuple[Any, ...]) -> str:
    """The group of the operator; of a function, its last string argument."""
    if args and isinstance(args[0], Primitive):
        return str(getattr(args[0], "group", WORLD))
    return next((value for value in reversed(args) if isinstance(value, str)), WORLD)


def _first_tensor(value: Any) -> Any:
    while isinstance(value, list | tuple):
        inner = [one for one in value if isinstance(one, Tensor | list | tuple)]
        if not inner:
            return None
        value = inner[0]
    return value if isinstance(value, Tensor) else None
