"""The agent's machine: what each order and each death causes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from taskd.core.agent.machine import (
    Done,
    Node,
    Outcome,
    State,
    Stopping,
    Training,
    Waiting,
    WorkersConfig,
    running,
    step,
)
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
    Event,
    Interrupted,
    KillWorker,
    ManagerConnected,
    PrepareStandby,
    RenewStore,
    SendHello,
    SendToManager,
    SignalWorker,
    StartWorker,
    WorkerStarted,
    WorkerStartFailed,
)
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank
from taskd.model.types import Tick

CONFIG = WorkersConfig()
RANKS = (Rank(2), Rank(3))
NODE = Node(NodeRank(1), RANKS, 5)


class Play:
    """Sends events to the machine and keeps its state."""

    def __init__(self, state: State | None = None, config: WorkersConfig = CONFIG) -> None:
        self.state: State = state or Waiting(NODE, 900.0)
        self.config = config
        self.now = 0.0

    def receive(self, event: Event) -> tuple[Command, ...]:
        outcome: Outcome = step(self.state, event, self.now, self.config)
        assert outcome.because
        self.state = outcome.state
        return outcome.commands

    def running(self) -> Play:
        self.receive(m.StartWorkers(5))
        self.start(2, 0)
        self.start(3, 0)
        return self

    def start(self, rank: int, incarnation: int) -> tuple[Command, ...]:
        return self.receive(
            WorkerStarted(Rank(rank), Incarnation(incarnation), 100 * incarnation + rank)
        )

    def end(self, rank: int, incarnation: int, code: int | None = None) -> tuple[Command, ...]:
        return self.receive(exited(rank, incarnation, code))


def exited(rank: int, incarnation: int, code: int | None = None) -> m.WorkerExited:
    signum = 9 if code is None else None
    return m.WorkerExited(
        Rank(rank), Incarnation(incarnation), 100 * incarnation + rank, code, signum, "why"
    )


def member(rank: int, incarnation: int) -> m.Member:
    return m.Member(Rank(rank), NodeRank(1), Incarnation(incarnation))


def start_worker(rank: int, incarnation: int, attempt: int = 0, incident: int = 0) -> StartWorker:
    return StartWorker(Rank(rank), Incarnation(incarnation), attempt, Incident(incident))


def kill(rank: int, incarnation: int) -> KillWorker:
    return KillWorker(Rank(rank), Incarnation(incarnation))


def test_no_rank_starts_without_permission() -> None:
    play = Play()
    hello = play.receive(ManagerConnected())
    assert hello == (
        SendToManager(m.AgentRegistered()),
        SendHello((), 0, 5),
        SendToManager(m.RestartsLeft(5)),
    )
    assert play.receive(m.StopWorkers(RANKS)) == ()
    assert play.receive(m.StartWorkers(4)) == (start_worker(2, 0), start_worker(3, 0))
    assert play.state.node.remaining == 4


def test_hello_is_repeated_on_request() -> None:
    play = Play().running()
    assert play.receive(m.RequestHello()) == play.receive(ManagerConnected())


def test_former_incarnations_end_and_the_node_stays_as_a_spare() -> None:
    play = Play().running()
    order = m.EndWorkers((member(2, 0), member(3, 1)))
    assert play.receive(order) == (kill(2, 0),), "rank 3 has another incarnation"
    play.end(2, 0)
    assert play.state.deadline == inf
    assert play.receive(order) == ()


def test_start_is_reported_once_all_ranks_run() -> None:
    play = Play()
    play.receive(m.StartWorkers(5))
    assert play.start(2, 0) == ()
    workers = (
        m.LocalWorker(Rank(2), Incarnation(0), 2),
        m.LocalWorker(Rank(3), Incarnation(0), 3),
    )
    report = SendToManager(m.WorkersStarted(NodeRank(1), workers))
    assert play.start(3, 0) == (report, PrepareStandby())


@pytest.mark.parametrize("order", [m.StartWorkers(-1), m.RestartAgent(-1)])
def test_no_rank_starts_without_a_restart_budget(order: Event) -> None:
    play = Play()
    assert play.receive(order) == ()
    assert isinstance(play.state, Done)
    assert play.state.exit_code == 1


def test_wait_for_permission_has_a_deadline() -> None:
    play = Play()
    play.now = 900.0
    play.receive(Tick())
    assert isinstance(play.state, Done)
    assert "no permission" in play.state.because


def test_death_is_reported_and_waits_for_an_order() -> None:
    play = Play().running()
    assert play.end(2, 0) == (SendToManager(exited(2, 0)),)
    assert play.state.deadline == CONFIG.order_timeout_s
    play.now = CONFIG.order_timeout_s
    assert play.receive(Tick()) == (SignalWorker(Rank(3), Incarnation(0), 15),)
    assert isinstance(play.state, Stopping)
    assert "no order for the dead ranks" in play.state.because


def test_only_dead_ranks_are_replaced() -> None:
    elsewhere = m.Member(Rank(7), NodeRank(3), Incarnation(1))
    play = Play().running()
    play.end(2, 0)
    order = m.ReplaceWorkers(Incident(1), (member(2, 1), elsewhere))
    assert play.receive(order) == (start_worker(2, 1, incident=1),)
    assert play.state.deadline == inf
    reports = play.start(2, 1)
    assert isinstance(reports[0], SendToManager)
    assert isinstance(reports[0].body, m.WorkersStarted)


def test_hung_rank_is_replaced_only_after_its_exit() -> None:
    play = Play().running()
    order = m.ReplaceWorkers(Incident(1), (member(2, 1),))
    assert play.receive(order) == (kill(2, 0),)
    assert play.end(2, 0) == (start_worker(2, 1, incident=1),)


def test_repeated_order_is_answered_twice_and_carried_out_once() -> None:
    play = Play().running()
    play.end(2, 0)
    order = m.ReplaceWorkers(Incident(1), (member(2, 1),))
    play.receive(order)
    (again,) = play.receive(order)
    assert isinstance(again, SendToManager)
    assert isinstance(again.body, m.WorkersStarted)


def test_order_of_an_older_incident_is_rejected() -> None:
    play = Play().running()
    play.receive(m.ReplaceWorkers(Incident(4), (member(2, 1),)))
    assert play.receive(m.ReplaceWorkers(Incident(3), (member(3, 1),))) == ()


def test_restart_begins_after_all_exits_and_with_a_new_store() -> None:
    play = Play().running()
    play.end(2, 0)
    order = m.RestartJob(Incident(1), 1, (member(2, 1), member(3, 1)))
    assert play.receive(order) == (kill(3, 0),)
    assert play.end(3, 0) == (
        RenewStore(1),
        start_worker(2, 1, 1, 1),
        start_worker(3, 1, 1, 1),
    )


def test_restart_of_the_running_attempt_changes_nothing() -> None:
    play = Play().running()
    play.end(2, 0)
    play.receive(m.RestartJob(Incident(1), 1, ()))
    play.end(3, 0)
    (report,) = play.receive(m.RestartJob(Incident(1), 1, ()))
    assert isinstance(report, SendToManager)


def test_process_that_started_too_late_is_killed() -> None:
    play = Play()
    play.receive(m.StartWorkers(5))
    play.start(2, 0)
    assert play.receive(m.RestartJob(Incident(1), 1, ())) == (kill(2, 0),)
    assert play.start(3, 0) == (kill(3, 0),)
    play.end(2, 0)
    commands = play.end(3, 0)
    assert commands[0] == RenewStore(1)


def test_orders_of_ascends_manager_are_carried_out() -> None:
    play = Play().running()
    assert play.receive(m.RestartWorkers((Rank(3), Rank(9)))) == (kill(3, 0),)
    assert play.end(3, 0) == (start_worker(3, 1),)
    play.start(3, 1)
    assert play.receive(m.StopWorkers((Rank(2),))) == (kill(2, 0),)
    assert play.end(2, 0) == (SendToManager(exited(2, 0)),)
    assert play.receive(m.RestartAgent(3)) == (kill(3, 1),)
    assert play.end(3, 1) == (RenewStore(1), start_worker(2, 1, 1), start_worker(3, 2, 1))
    play.start(2, 1)
    play.start(3, 2)
    ordered = play.receive(m.ExitAgent())
    assert ordered == (SendToManager(m.RanksFailed(())), kill(2, 1), kill(3, 2))
    play.end(2, 1)
    play.end(3, 2)
    assert isinstance(play.state, Done)
    assert play.state.exit_code == 1


def test_repaired_node_registers_again_with_ascends_manager() -> None:
    """Only a registration clears the death that it has heard of. 25 minutes after a death on the
    first node, it would end the whole job."""
    again = SendToManager(m.AgentRegistered())
    play = Play(config=replace(CONFIG, in_ascends_words=True))
    play.receive(m.StartWorkers(5))
    play.start(2, 0)
    assert again not in play.start(3, 0)
    assert SendToManager(m.RanksFailed((Rank(3),))) in play.end(3, 0)
    play.receive(m.RestartWorkers((Rank(3),)))
    assert again in play.start(3, 1)


def test_node_ends_when_the_manager_orders_it() -> None:
    play = Play().running()
    play.end(2, 0, 0)
    play.end(3, 0, 0)
    assert isinstance(play.state, Training)
    play.receive(m.EndJob(0, "all is done"))
    assert isinstance(play.state, Done)
    assert (play.state.exit_code, play.state.because) == (0, "all is done")


def test_finished_node_has_a_deadline() -> None:
    play = Play().running()
    play.end(2, 0, 0)
    play.end(3, 0, 0)
    play.now = play.state.deadline
    play.receive(Tick())
    assert isinstance(play.state, Done)
    assert play.state.exit_code == 0


def test_first_interrupt_signals_and_second_kills() -> None:
    play = Play().running()
    asked = play.receive(Interrupted("stopped by Ctrl-C", 2))
    assert asked == (
        SendToManager(m.EndJob(1, "node 1 was stopped by Ctrl-C")),
        SendToManager(m.RanksFailed(())),
        SignalWorker(Rank(2), Incarnation(0), 2),
        SignalWorker(Rank(3), Incarnation(0), 2),
    )
    assert play.state.deadline == CONFIG.grace_s
    assert play.receive(Interrupted("Ctrl-C", 2)) == (kill(2, 0), kill(3, 0))
    assert play.receive(Interrupted("Ctrl-C", 2)) == ()
    play.end(2, 0)
    play.end(3, 0)
    assert isinstance(play.state, Done)


def test_worker_that_ignores_sigterm_is_killed() -> None:
    play = Play().running()
    play.receive(m.EndJob(1, "no hope"))
    play.end(2, 0)
    play.now = play.state.deadline
    assert play.receive(Tick()) == (kill(3, 0),)


def test_failed_start_counts_as_a_death() -> None:
    play = Play()
    play.receive(m.StartWorkers(5))
    (report,) = play.receive(WorkerStartFailed(Rank(2), Incarnation(0), "no memory"))
    assert isinstance(report, SendToManager)
    assert isinstance(report.body, m.WorkerExited)
    assert "no memory" in report.body.evidence


def test_process_that_aborts_after_its_script_has_ended_is_finished() -> None:
    play = Play().running()
    aborted = replace(exited(2, 0), signal=6, script_ended=True)
    assert play.receive(aborted) == (SendToManager(aborted),)
    assert play.state.deadline == inf, "no order is awaited"
    play.end(3, 0, 0)
    play.now = play.state.deadline
    play.receive(Tick())
    assert isinstance(play.state, Done)
    assert play.state.exit_code == 0


def test_new_manager_gets_running_and_ended_ranks() -> None:
    play = Play().running()
    play.end(2, 0)
    alive = (m.LocalWorker(Rank(3), Incarnation(0), 3),)
    assert play.receive(ManagerConnected()) == (
        SendToManager(m.AgentRegistered()),
        SendToManager(exited(2, 0)),
        SendHello(alive, 0, 5),
    )


def test_bad_node_reports_it_to_every_new_manager() -> None:
    play = Play().running()
    assert play.receive(m.NodeMarkedBad("rank 2: 1 of 9 products were wrong")) == ()
    (said,) = (one for one in play.receive(ManagerConnected()) if isinstance(one, SendHello))
    assert said.condemned == "rank 2: 1 of 9 products were wrong"


def test_new_agent_continues_the_count_of_incarnations() -> None:
    play = Play()
    order = m.RestartJob(Incident(3), 2, (member(2, 4), member(3, 2)))
    assert play.receive(order) == (start_worker(2, 4, 2, 3), start_worker(3, 2, 2, 3))
    play.start(2, 4)
    play.start(3, 2)
    assert isinstance(play.state, Training)
    assert [w.incarnation for w in running(play.state.workers)] == [4, 2]
