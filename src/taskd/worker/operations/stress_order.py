"""The stress test inside a training process: asked for by the manager, run beside the pause.

The training thread stands still meanwhile. Each operation (`torch/operations/device_tests.py` for
PyTorch) runs in a thread of its own with a limit; a device that never answers costs its thread,
not the process. While it runs the manager is told every second that we live. Any order of
recovery ends it at once: whoever repairs has the links for himself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from taskd.model import messages as m
from taskd.model.ids import Rank
from taskd.model.operations import COMPUTE, NOT_RUN, P2P, TIMED_OUT, OpResult
from taskd.runtime.clock import monotonic
from taskd.worker.bus_connection import Say

log = logging.getLogger(__name__)

BEAT_S = 1.0
LIMITS_S = {COMPUTE: 300.0, P2P: 600.0}


class Stopped(Exception):
    """The test is not wanted any more."""


@dataclass
class Request:
    """One operation to be run, and the way to end it early."""

    uuid: str
    rank: Rank
    ranks: tuple[Rank, ...]
    """All that run the same operation at the same time."""
    limit_s: float
    stopped: threading.Event = field(default_factory=threading.Event)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Called from another thread when the test must end, to free whoever waits."""
        self._undo.append(undo)
        if self.stopped.is_set():
            undo()

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def stop(self) -> None:
        self.stopped.set()
        for undo in self._undo:
            undo()


Operation = Callable[[Request], OpResult]


class StressTester:
    """A rider on the process's line to the manager (`line.py`)."""

    def __init__(
        self,
        rank: Rank,
        operations: Mapping[int, Operation],
        limits_s: Mapping[int, float] = LIMITS_S,
    ) -> None:
        self._rank, self._operations, self._limits_s = rank, operations, limits_s
        self._say: Say | None = None
        self._running: Request | None = None
        self._order: m.RunStressTest | None = None
        self._result: m.StressTested | None = None
        self._lock = threading.Lock()

    def joined(self, say: Say) -> None:
        self._say = say
        if self._result is not None:
            say(self._result)

    def heard(self, body: m.Body) -> None:
        match body:
            case m.RunStressTest():
                self._ask(body)
            case m.Park() | m.Repair() | m.Dump() | m.Leave():
                self.stop()
            case _:
                pass

    def stop(self) -> None:
        """Returns when nothing of the test touches a link any more."""
        with self._lock:
            self._order = None
            running, self._running = self._running, None
        if running is not None:
            log.info("the stress test is cut short")
            running.stop()

    def _ask(self, order: m.RunStressTest) -> None:
        ops = order.ops.get(self._rank)
        if ops is None or not order.uuid:
            return
        with self._lock:
            known = self._order is not None and self._order.uuid == order.uuid
        if known:
            if self._result is not None and self._result.uuid == order.uuid:
                self._tell(self._result)
            return
        self.stop()
        with self._lock:
            self._order, self._result = order, None
        threading.Thread(
            target=self._run, args=(order, ops), name="taskd-stress", daemon=True
        ).start()

    def _run(self, order: m.RunStressTest, ops: tuple[int, ...]) -> None:
        results: dict[str, tuple[str, str]] = {}
        for op in sorted(ops):
            found = self._one(order, op)
            if found is None:
                return
            results[str(op)] = found.code, found.text
            log.info("stress test %s, operation %d: %s", order.uuid, op, found.text)
        self._result = m.StressTested(order.uuid, results)
        self._tell(self._result)

    def _one(self, order: m.RunStressTest, op: int) -> OpResult | None:
        """None: the test was ended from outside."""
        operation = self._operations.get(op)
        if operation is None:
            return OpResult(NOT_RUN, f"there is no operation {op} here")
        peers = tuple(sorted(rank for rank, ops in order.ops.items() if op in ops))
        limit_s = self._limits_s.get(op, max(LIMITS_S.values()))
        request = Request(order.uuid, self._rank, peers, limit_s)
        with self._lock:
            if self._order is not order:
                return None
            self._running = request
        ended, found = threading.Event(), list[OpResult]()

        def attempt() -> None:
            try:
                found.append(operation(request))
            except Stopped:
                pass
            except Exception as error:
                log.warning("operation %d of the stress test failed", op, exc_info=True)
                found.append(OpResult(NOT_RUN, f"{type(error).__name__}: {error}"[:500]))
            ended.set()

        threading.Thread(target=attempt, name=f"taskd-stress-{op}", daemon=True).start()
        deadline = monotonic() + limit_s
        while not ended.wait(BEAT_S):
            self._tell(m.KeptAlive())
            if monotonic() > deadline:
                request.stop()
                return OpResult(TIMED_OUT, f"no result in {limit_s:g} s")
        with self._lock:
            current, self._running = self._running is request, None
        return found[0] if found and current else None

    def _tell(self, body: m.Body) -> None:
        if self._say is not None:
            self._say(body)
