"""The stress test inside a rank: run in its own thread, answered, stopped by recovery orders."""

from __future__ import annotations

import queue
import threading

import pytest

from taskd.model import messages as m
from taskd.model.ids import Incident, Rank
from taskd.model.operations import FAULTY, NOT_RUN, PASSED, TIMED_OUT, OpResult
from taskd.worker.operations.stress_order import Operation, Request, StressTester

DEADLINE_S = 20.0
LIMITS = {0: 60.0, 1: 60.0}


class Sent:
    """The messages of the rank to the manager; keep-alives are only counted."""

    def __init__(self) -> None:
        self._bodies: queue.Queue[m.Body] = queue.Queue()
        self.keep_alives = 0

    def __call__(self, body: m.Body) -> None:
        if isinstance(body, m.KeptAlive):
            self.keep_alives += 1
        else:
            self._bodies.put(body)

    def next(self) -> m.StressTested:
        body = self._bodies.get(timeout=DEADLINE_S)
        assert isinstance(body, m.StressTested)
        return body

    def nothing(self) -> bool:
        return self._bodies.empty()


def passes(request: Request) -> OpResult:
    return OpResult(PASSED, f"with {list(request.ranks)}")


def fails(request: Request) -> OpResult:
    raise RuntimeError("no such device")


def stress_tester(sent: Sent, limits: dict[int, float] = LIMITS, **ops: Operation) -> StressTester:
    operations = {int(name[2:]): operation for name, operation in ops.items()}
    created = StressTester(Rank(1), operations, limits)
    created.joined(sent)
    return created


def order(*ops: int, uuid: str = "u") -> m.RunStressTest:
    return m.RunStressTest(uuid, {Rank(1): ops, Rank(2): (1,)})


def test_operations_run_in_order_with_all_ranks_that_run_them() -> None:
    sent = Sent()
    stress_tester(sent, op0=passes, op1=passes).received(order(1, 0))
    assert sent.next() == m.StressTested("u", {"0": ("0", "with [1]"), "1": ("0", "with [1, 2]")})


def test_failed_or_unknown_operation_has_code_1_and_the_next_one_runs() -> None:
    sent = Sent()
    stress_tester(sent, op0=fails, op1=passes).received(order(0, 1, 7))
    results = sent.next().results
    assert results["0"] == (NOT_RUN, "RuntimeError: no such device")
    assert results["1"][0] == PASSED
    assert results["7"][0] == NOT_RUN


def test_device_that_never_answers_has_code_3() -> None:
    sent, never = Sent(), threading.Event()

    def hangs(request: Request) -> OpResult:
        never.wait(DEADLINE_S)
        return OpResult(PASSED, "")

    stress_tester(sent, {0: 0.1}, op0=hangs).received(order(0))
    assert sent.next().results["0"][0] == TIMED_OUT
    assert sent.keep_alives >= 1
    never.set()


def test_order_for_other_ranks_is_ignored() -> None:
    sent = Sent()
    stress_tester(sent, op0=passes).received(m.RunStressTest("u", {Rank(5): (0,)}))
    assert sent.nothing()


def test_repeated_order_is_answered_again_but_not_run_twice() -> None:
    sent, runs = Sent(), list[int]()

    def counts(request: Request) -> OpResult:
        runs.append(1)
        return OpResult(FAULTY, "x")

    rank = stress_tester(sent, op0=counts)
    rank.received(order(0))
    first = sent.next()
    rank.received(order(0))
    assert sent.next() == first
    assert runs == [1]


@pytest.mark.parametrize("recovery_order", [m.Park(Incident(2), ""), m.Leave(Incident(2), "")])
def test_recovery_order_stops_the_test_without_a_result(recovery_order: m.Body) -> None:
    sent = Sent()
    started, undone, stopped = threading.Event(), threading.Event(), threading.Event()

    def waits(request: Request) -> OpResult:
        request.on_stop(undone.set)
        started.set()
        assert request.stopped.wait(DEADLINE_S)
        stopped.set()
        request.check()
        raise AssertionError("check did not raise in a stopped test")

    rank = stress_tester(sent, op0=waits)
    rank.received(order(0))
    assert started.wait(DEADLINE_S)
    rank.received(recovery_order)
    assert undone.is_set(), "the links must be free when received() returns"
    assert stopped.wait(DEADLINE_S)
    rank.received(order(1, uuid="next"))
    assert sent.next().uuid == "next"
