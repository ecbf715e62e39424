"""The stress test inside a training process, which the manager orders while training is parked.

Each operation (`torch/operations/device_tests.py` for PyTorch) runs in its own thread with a time
limit, so a device that never answers blocks that thread, not the process. While it runs, the
manager gets a keep-alive every second. Any order of recovery ends the test at once: the repair
needs the links.
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
from taskd.worker.bus_connection import Send

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 1.0
LIMITS_S = {COMPUTE: 300.0, P2P: 600.0}


class Stopped(Exception):
    """The test was stopped from outside."""


@dataclass
class Request:
    """One operation to run, and how to stop it early."""

    uuid: str
    rank: Rank
    ranks: tuple[Rank, ...]
    """All ranks that run the same operation at the same time."""
    limit_s: float
    stopped: threading.Event = field(default_factory=threading.Event)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def on_stop(self, undo: Callable[[], None]) -> None:
        """Register a call that frees a waiting operation; another thread makes it on `stop`."""
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
    """A subscriber of the process's bus connection."""

    def __init__(
        self,
        rank: Rank,
        operations: Mapping[int, Operation],
        limits_s: Mapping[int, float] = LIMITS_S,
    ) -> None:
        self._rank, self._operations, self._limits_s = rank, operations, limits_s
        self._send: Send | None = None
        self._running: Request | None = None
        self._order: m.RunStressTest | None = None
        self._result: m.StressTested | None = None
        self._lock = threading.Lock()

    def joined(self, send: Send) -> None:
        self._send = send
        if self._result is not None:
            send(self._result)

    def received(self, body: m.Body) -> None:
        match body:
            case m.RunStressTest():
                self._start(body)
            case m.Park() | m.Repair() | m.Dump() | m.Leave():
                self.stop()
            case _:
                pass

    def stop(self) -> None:
        """Stop the test. When this returns, the test no longer uses any link."""
        with self._lock:
            self._order = None
            running, self._running = self._running, None
        if running is not None:
            log.info("the stress test is stopped: uuid=%s", running.uuid)
            running.stop()

    def _start(self, order: m.RunStressTest) -> None:
        ops = order.ops.get(self._rank)
        if ops is None or not order.uuid:
            return
        with self._lock:
            known = self._order is not None and self._order.uuid == order.uuid
        if known:
            if self._result is not None and self._result.uuid == order.uuid:
                self._report(self._result)
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
            result = self._run_operation(order, op)
            if result is None:
                return
            results[str(op)] = result.code, result.text
            log.info("stress test: uuid=%s operation=%d result=%s", order.uuid, op, result.text)
        self._result = m.StressTested(order.uuid, results)
        self._report(self._result)

    def _run_operation(self, order: m.RunStressTest, op: int) -> OpResult | None:
        """None: the test was stopped."""
        operation = self._operations.get(op)
        if operation is None:
            return OpResult(NOT_RUN, f"unknown operation {op} (known: {sorted(self._operations)})")
        peers = tuple(sorted(rank for rank, ops in order.ops.items() if op in ops))
        limit_s = self._limits_s.get(op, max(LIMITS_S.values()))
        request = Request(order.uuid, self._rank, peers, limit_s)
        with self._lock:
            if self._order is not order:
                return None
            self._running = request
        ended, results = threading.Event(), list[OpResult]()

        def attempt() -> None:
            try:
                results.append(operation(request))
            except Stopped:
                pass
            except Exception as error:
                log.warning("stress test: operation %d has failed", op, exc_info=True)
                results.append(OpResult(NOT_RUN, f"{type(error).__name__}: {error}"[:500]))
            ended.set()

        threading.Thread(target=attempt, name=f"taskd-stress-{op}", daemon=True).start()
        deadline = monotonic() + limit_s
        while not ended.wait(KEEP_ALIVE_S):
            self._report(m.KeptAlive())
            if monotonic() > deadline:
                request.stop()
                return OpResult(TIMED_OUT, f"no result in {limit_s:g} s")
        with self._lock:
            current, self._running = self._running is request, None
        return results[0] if results and current else None

    def _report(self, body: m.Body) -> None:
        if self._send is not None:
            self._send(body)
