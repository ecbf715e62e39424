"""The manager's machine is gone: the other nodes say so in seconds and do not wait for ever."""

from __future__ import annotations

from math import inf

from taskd.core.agent.lost_manager import NOTICE_S, Contact
from taskd.core.agent.machine import Stopping, Training
from taskd.model.agent import (
    ManagerConnected,
    ManagerLost,
    RanksTrain,
    SendHello,
    SignalWorker,
)
from taskd.model.ids import Incarnation, Rank, Step
from taskd.model.messages import Progress
from taskd.model.types import Tick
from tests.unit.core.agent.test_agent_machine import CONFIG, Play

LOST = ManagerLost("the manager is unreachable")


def progress(step: int) -> tuple[Progress, ...]:
    return (Progress(Rank(2), Incarnation(0), Step(step), 0.0, waiting=False, collective=step),)


def looked(*looks: tuple[float, bool, int]) -> Contact:
    contact = Contact()
    for now, connected, step in looks:
        contact = contact.look(connected, progress(step), now)
    return contact


def test_manager_is_lost_when_it_is_unreachable_and_no_rank_moves() -> None:
    contact = looked((10.0, True, 7), (10.4, False, 7))
    assert not contact.is_lost(10.4 + NOTICE_S - 0.1)
    assert contact.is_lost(10.4 + NOTICE_S)


def test_manager_that_is_restarted_while_ranks_train_is_not_lost() -> None:
    contact = looked((10.0, False, 7), (14.0, False, 8))
    assert not contact.is_lost(10.0 + NOTICE_S)
    assert contact.is_lost(14.0 + NOTICE_S)


def test_slow_ranks_do_not_mean_that_a_connected_manager_is_lost() -> None:
    assert not looked((10.0, True, 7), (20.0, True, 7)).is_lost(1000.0)


def test_node_whose_ranks_have_not_started_waits_in_silence() -> None:
    assert not Contact().look(False, (), 10.0).is_lost(1000.0)


def test_node_ends_when_the_manager_does_not_come_back() -> None:
    play = Play().running()
    play.receive(LOST)
    assert isinstance(play.state, Training)
    play.now = play.state.deadline
    assert play.now == CONFIG.lost_manager_s
    signals = play.receive(Tick())
    assert isinstance(play.state, Stopping)
    assert play.state.exit_code == 1
    assert "unreachable; it did not come back" in play.state.because
    assert {type(command) for command in signals} == {SignalWorker}


def test_job_goes_on_when_the_manager_comes_back_or_the_ranks_train() -> None:
    for event in (ManagerConnected(), RanksTrain()):
        play = Play().running()
        play.receive(LOST)
        commands = play.receive(event)
        assert isinstance(play.state, Training)
        assert (play.state.deadline, play.state.lost) == (inf, None)
        said_hello = any(isinstance(command, SendHello) for command in commands)
        assert said_hello == isinstance(event, ManagerConnected)


def test_deadline_for_orders_holds_again_when_the_manager_is_back() -> None:
    play = Play().running()
    play.end(2, 0)
    order_by = play.state.deadline
    play.now = 1.0
    play.receive(LOST)
    assert play.state.deadline != order_by
    play.receive(ManagerConnected())
    assert play.state.deadline == order_by
