"""The manager's side of an operation: orders, results, exactly one reply, deadlines."""

from __future__ import annotations

from taskd.core.manager import operation_progress as operations
from taskd.core.manager.operation_progress import (
    Idle,
    OperationsConfig,
    Outcome,
    State,
    Switching,
    describe,
    step,
)
from taskd.model.ids import EVERY_WORKER, NodeRank, Rank
from taskd.model.messages import KeptAlive, NicSwitched, RunStressTest, StressTested, SwitchNic
from taskd.model.operations import (
    TIMED_OUT,
    Event,
    NicResult,
    NicSwitchRequested,
    PauseEnded,
    SendToWorker,
    StressResult,
    StressTestRequested,
    WorkerReplied,
)
from taskd.model.types import Tick

CONFIG = OperationsConfig(silence_s=10.0, stress_s=100.0, switch_s=50.0)
PLACES = {Rank(rank): NodeRank(rank // 2) for rank in range(4)}
TEST = StressTestRequested("u", {Rank(0): (0, 1), Rank(3): (0,)})
PASSED = {"0": ("0", "fine")}


def go(state: State, event: Event, now: float = 0.0) -> Outcome:
    return step(state, event, PLACES, now, CONFIG)


def test_stress_test_is_answered_after_the_last_rank() -> None:
    begun = go(Idle(), TEST)
    order = RunStressTest("u", TEST.ops)
    assert [c.body for c in begun.commands if isinstance(c, SendToWorker)] == [order, order]
    assert describe(begun.state) == "stress test (compute, p2p), 0 of 2 ranks done"
    half = go(begun.state, WorkerReplied(Rank(0), StressTested("u", PASSED)), 1.0)
    assert not half.commands
    done = go(half.state, WorkerReplied(Rank(3), StressTested("u", PASSED)), 2.0)
    assert done.state == Idle()
    (reply,) = done.commands
    assert isinstance(reply, StressResult)
    assert {rank: dict(per_op)["0"].code for rank, per_op in reply.results.items()} == {
        Rank(0): "0",
        Rank(3): "0",
    }


def test_results_of_another_test_or_rank_do_not_count() -> None:
    state = go(Idle(), TEST).state
    for rank, uuid in ((Rank(0), "older"), (Rank(1), "u")):
        after = go(state, WorkerReplied(rank, StressTested(uuid, PASSED)), 1.0)
        assert isinstance(after.state, operations.Testing)
        assert not after.state.results


def test_silent_rank_gets_code_3_and_does_not_block_the_others() -> None:
    state = go(Idle(), TEST).state
    state = go(state, WorkerReplied(Rank(0), KeptAlive()), 8.0).state
    assert state.deadline == 10.0
    late = go(state, Tick(), 10.0)
    assert isinstance(late.state, operations.Testing)
    done = go(late.state, WorkerReplied(Rank(0), StressTested("u", PASSED)), 11.0)
    (reply,) = done.commands
    assert isinstance(reply, StressResult)
    assert reply.results[Rank(3)]["0"].code == TIMED_OUT
    assert reply.results[Rank(3)]["0"].text == "worker heartbeat timeout"


def test_stress_test_has_a_deadline() -> None:
    state = go(Idle(), TEST).state
    for now in range(9, 100, 9):
        for rank in (Rank(0), Rank(3)):
            state = go(state, WorkerReplied(rank, KeptAlive()), now).state
    over = go(state, Tick(), 100.0)
    (reply,) = over.commands
    assert isinstance(reply, StressResult)
    codes = {one.code for per_op in reply.results.values() for one in per_op.values()}
    assert codes == {TIMED_OUT}


def test_stress_test_of_unknown_ranks_is_answered_at_once() -> None:
    outcome = go(Idle(), StressTestRequested("u", {Rank(9): (0,)}))
    assert outcome.commands == (StressResult({}),)


def test_nic_switch_needs_all_ranks_not_only_those_that_move() -> None:
    asked = NicSwitchRequested("n", (Rank(1),), (True,))
    begun = go(Idle(), asked)
    assert begun.commands == (SendToWorker(EVERY_WORKER, SwitchNic("n", (Rank(1),), (True,))),)
    assert "rank 1 to the backup" in describe(begun.state)
    state = begun.state
    for rank in list(PLACES)[:-1]:
        outcome = go(state, WorkerReplied(rank, NicSwitched("n", True)))
        assert not outcome.commands
        state = outcome.state
    assert go(state, WorkerReplied(Rank(3), NicSwitched("n", True))).commands == (NicResult(True),)


def test_one_rank_that_cannot_switch_ends_the_nic_switch() -> None:
    state = go(Idle(), NicSwitchRequested("n", (Rank(1),), (True,))).state
    assert go(state, WorkerReplied(Rank(2), NicSwitched("n", False))).commands == (
        NicResult(False),
    )


def test_nic_switch_has_a_deadline() -> None:
    state = go(Idle(), NicSwitchRequested("n", (Rank(1),), (True,))).state
    assert isinstance(state, Switching)
    assert go(state, Tick(), 50.0).commands == (NicResult(False),)


def test_end_of_the_pause_drops_the_operation_without_a_reply() -> None:
    state = go(Idle(), TEST).state
    outcome = go(state, PauseEnded(), 1.0)
    assert outcome.state == Idle()
    assert not outcome.commands
    late = go(outcome.state, WorkerReplied(Rank(0), StressTested("u", PASSED)), 2.0)
    assert not late.commands
