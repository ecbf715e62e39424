"""The stress test inside a rank: heard, run aside, answered; ended by any order of recovery."""

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


class Said:
    """What the rank has told the manager, signs of life aside."""

    def __init__(self) -> None:
        self._bodies: queue.Queue[m.Body] = queue.Queue()
        self.beats = 0

    def __call__(self, body: m.Body) -> None:
        if isinstance(body, m.KeptAlive):
            self.beats += 1
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


def rank_under(said: Said, limits: dict[int, float] = LIMITS, **ops: Operation) -> StressTester:
    known = {int(name[2:]): operation for name, operation in ops.items()}
    made = StressTester(Rank(1), known, limits)
    made.joined(said)
    return made


def order(*ops: int, uuid: str = "u") -> m.RunStressTest:
    return m.RunStressTest(uuid, {Rank(1): ops, Rank(2): (1,)})


def test_operations_run_in_order_with_those_who_run_the_same() -> None:
    said = Said()
    rank_under(said, op0=passes, op1=passes).heard(order(1, 0))
    assert said.next() == m.StressTested("u", {"0": ("0", "with [1]"), "1": ("0", "with [1, 2]")})


def test_an_operation_that_raises_or_is_unknown_has_code_1_and_the_next_runs() -> None:
    said = Said()
    rank_under(said, op0=fails, op1=passes).heard(order(0, 1, 7))
    results = said.next().results
    assert results["0"] == (NOT_RUN, "RuntimeError: no such device")
    assert results["1"][0] == PASSED
    assert results["7"][0] == NOT_RUN


def test_a_device_that_never_answers_has_code_3() -> None:
    said, never = Said(), threading.Event()

    def hangs(request: Request) -> OpResult:
        never.wait(DEADLINE_S)
        return OpResult(PASSED, "")

    rank_under(said, {0: 0.1}, op0=hangs).heard(order(0))
    assert said.next().results["0"][0] == TIMED_OUT
    assert said.beats >= 1
    never.set()


def test_an_order_for_others_is_not_ours() -> None:
    said = Said()
    rank_under(said, op0=passes).heard(m.RunStressTest("u", {Rank(5): (0,)}))
    assert said.nothing()


def test_the_same_order_again_is_answered_again_and_not_run_twice() -> None:
    said, runs = Said(), list[int]()

    def counts(request: Request) -> OpResult:
        runs.append(1)
        return OpResult(FAULTY, "x")

    one = rank_under(said, op0=counts)
    one.heard(order(0))
    first = said.next()
    one.heard(order(0))
    assert said.next() == first
    assert runs == [1]


@pytest.mark.parametrize("word", [m.Park(Incident(2), ""), m.Leave(Incident(2), "")])
def test_an_order_of_recovery_ends_the_test_at_once_and_nothing_is_said(word: m.Body) -> None:
    said = Said()
    begun, undone, left = threading.Event(), threading.Event(), threading.Event()

    def works(request: Request) -> OpResult:
        request.on_stop(undone.set)
        begun.set()
        assert request.stopped.wait(DEADLINE_S)
        left.set()
        request.check()
        raise AssertionError("check lets a stopped test go on")

    one = rank_under(said, op0=works)
    one.heard(order(0))
    assert begun.wait(DEADLINE_S)
    one.heard(word)
    assert undone.is_set(), "the links must be free when heard() returns"
    assert left.wait(DEADLINE_S)
    one.heard(order(1, uuid="next"))
    assert said.next().uuid == "next"
