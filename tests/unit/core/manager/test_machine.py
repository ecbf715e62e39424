"""The manager's machine: one rule of the recovery documentation per test."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from taskd.core.manager import machine
from taskd.core.manager.states import (
    Awaiting,
    Deciding,
    Dumping,
    Ended,
    Ending,
    Gathering,
    JobConfig,
    Outcome,
    Paused,
    Repairing,
    Reported,
    Restarting,
    Resuming,
    State,
    Stopping,
    Suspecting,
    Training,
    with_job,
)
from taskd.errors import DO_NOT_REPLACE
from taskd.model import messages as m
from taskd.model.clusterd import FaultReport, ResultReport, Signal, StopReport, StrategiesReport
from taskd.model.faults import Fault, FaultCause, FaultKind
from taskd.model.ids import (
    EVERY_WORKER,
    Incarnation,
    Incident,
    NodeRank,
    Position,
    Rank,
    Step,
    agent,
    worker,
)
from taskd.model.manager import (
    Event,
    Finish,
    JobStalled,
    MessageReceived,
    NodeConnected,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    RankHung,
    SendMessage,
    SignalReceived,
    Subscribed,
)
from taskd.model.types import Tick

T = TypeVar("T")
CONFIG = JobConfig(nodes=2, ranks_per_node=2)


class Play:
    """Sends events to the machine; keeps the commands of the last one."""

    def __init__(self, config: JobConfig = CONFIG) -> None:
        self.config, self.now = config, 0.0
        self.state: State = machine.begin(config, 0.0)
        self.last = Outcome(self.state)
        self.incarnations: dict[int, int] = {}

    def step(self, event: Event, now: float | None = None) -> Play:
        self.now = self.now + 0.001 if now is None else now
        self.last = machine.step(self.state, event, self.now, self.config)
        self.state = self.last.state
        return self

    def late(self) -> Play:
        return self.step(Tick(), self.state.deadline)

    def receive(self, src: Position, body: m.Body) -> Play:
        return self.step(MessageReceived(src, body))

    def sent(self, kind: type[T]) -> list[T]:
        """The commands of one type, or the sent messages of one type."""
        sent = [c.body if isinstance(c, SendMessage) else c for c in self.last.commands]
        return [item for item in sent if isinstance(item, kind)]

    # Events

    def agent_joins(self, node: int, running: bool = False) -> Play:
        locals_ = self.locals(node) if running else ()
        hello = m.AgentHello(NodeRank(node), f"host{node}", locals_, f"host{node}:29500")
        self.receive(agent(node), hello)
        return self if running else self.receive(agent(node), m.RestartsLeft(3))

    def started(self, node: int) -> Play:
        return self.receive(agent(node), m.WorkersStarted(NodeRank(node), self.locals(node)))

    def locals(self, node: int) -> tuple[m.LocalWorker, ...]:
        per_node = self.config.ranks_per_node
        ranks = range(node * per_node, (node + 1) * per_node)
        return tuple(
            m.LocalWorker(Rank(r), Incarnation(self.incarnations.get(r, 0)), 1000 + r)
            for r in ranks
        )

    def hello(self, rank: int, phase: str = "training", protected: bool = True) -> Play:
        node = rank // self.config.ranks_per_node
        incarnation = Incarnation(self.incarnations.get(rank, 0))
        incident = self.state.job.incident
        step = Step(7 if protected else 0)
        hello = m.WorkerHello(
            Rank(rank), NodeRank(node), incarnation, 1, incident, step, phase, protected
        )
        return self.receive(worker(node, rank), hello)

    def dies(self, rank: int, code: int | None = None, signal: int | None = 9) -> Play:
        return self.exits(rank, code, signal)

    def exits(
        self,
        rank: int,
        code: int | None,
        signal: int | None,
        *,
        script_ended: bool = False,
        error: m.ScriptError | None = None,
        step: int = 0,
    ) -> Play:
        node = rank // self.config.ranks_per_node
        incarnation = Incarnation(self.incarnations.get(rank, 0))
        how = code, signal, "boom", script_ended, error, Step(step)
        return self.receive(agent(node), m.WorkerExited(Rank(rank), incarnation, 1, *how))

    def raises(self, rank: int, error: m.ScriptError, step: int = 0) -> Play:
        return self.exits(rank, 1, None, error=error, step=step)

    def parks(self, *ranks: int, step: int = 7, whole: bool = True) -> Play:
        for rank in ranks:
            incarnation, incident = (
                Incarnation(self.incarnations.get(rank, 0)),
                self.state.job.incident,
            )
            parked = m.Parked(Rank(rank), incarnation, incident, Step(step), whole)
            self.receive(worker(rank // self.config.ranks_per_node, rank), parked)
        return self

    def says(self, kind: type[m.Repaired] | type[m.Committed], *ranks: int, step: int = 7) -> Play:
        for rank in ranks:
            incarnation, incident = (
                Incarnation(self.incarnations.get(rank, 0)),
                self.state.job.incident,
            )
            body = kind(Rank(rank), incarnation, incident, Step(step))
            self.receive(worker(rank // self.config.ranks_per_node, rank), body)
        return self

    def orders(self, signal: Signal) -> Play:
        return self.step(SignalReceived(signal))

    # Shortcuts to a state

    def training(self, protected: bool = True) -> Play:
        for node in range(self.config.nodes):
            self.agent_joins(node).started(node)
        for rank in range(self.config.nodes * self.config.ranks_per_node):
            self.hello(rank, protected=protected)
        assert isinstance(self.state, Training)
        return self

    def stopping(self) -> Play:
        self.training().dies(3).orders(STOP)
        assert isinstance(self.state, Stopping)
        return self

    def deciding(self) -> Play:
        self.stopping().parks(0, 1, 2)
        assert isinstance(self.state, Deciding)
        return self

    def repairing(self) -> Play:
        self.deciding().orders(ASK).orders(IN_PLACE)
        assert isinstance(self.state, Repairing)
        self.incarnations[3] = 1
        return self


def signal(kind: str, *actions: str, incident: int = 1, uuid: str = "u1", **more: object) -> Signal:
    return Signal(uuid=uuid, incident=Incident(incident), type=kind, actions=actions, **more)  # type: ignore[arg-type]


STOP = signal("stopTrain", "stop_train", sequence=1)
ASK = signal("globalFault", "on_global_rank", sequence=2)
IN_PLACE = signal(
    "changeStrategy", "change_strategy", strategy="recover", extra="recover-in-place", sequence=3
)


def change(strategy: str, **more: object) -> Signal:
    return signal("changeStrategy", "change_strategy", strategy=strategy, sequence=3, **more)  # type: ignore[arg-type]


# Starting


def test_agent_gets_permission_to_start() -> None:
    play = Play().agent_joins(0)
    assert play.sent(m.StartWorkers) == [m.StartWorkers(3)]


def test_ascend_agent_gets_permission_without_a_hello() -> None:
    play = Play().receive(agent(0), m.AgentRegistered()).receive(agent(0), m.RestartsLeft(32767))
    assert play.sent(m.StartWorkers) == [m.StartWorkers(32767)]


def test_restart_budget_has_no_limit_by_default() -> None:
    play = Play(JobConfig(nodes=1)).receive(agent(0), m.RestartsLeft(0))
    assert play.sent(m.StartWorkers) == [m.StartWorkers(32767)]


def test_restart_budget_of_zero_permits_no_restart() -> None:
    play = Play(replace(CONFIG, max_restarts=0)).training(protected=False).dies(3)
    play.orders(signal("stopTrain", "stop_train", uuid="u1"))
    play.orders(signal("globalFault", "on_global_rank", uuid="u1"))
    assert play.sent(StrategiesReport)[0].strategies == ("exit",)


def test_permission_waits_while_clusterd_withholds_starts() -> None:
    play = Play(JobConfig()).agent_joins(0).started(0)
    play = Play(replace(CONFIG, nodes=1)).training()
    play.orders(signal("pauseStartAgent", uuid="p"))
    play.receive(agent(5), m.AgentRegistered()).receive(agent(5), m.RestartsLeft(2))
    assert not play.last.commands
    play.orders(signal("continueStartAgent", uuid="q"))
    assert play.sent(m.StartWorkers) == [m.StartWorkers(2)]


def test_training_begins_when_all_ranks_run() -> None:
    play = Play().agent_joins(0).agent_joins(1).started(0)
    assert isinstance(play.state, Gathering)
    assert isinstance(play.started(1).state, Training)


def test_node_that_never_joins_ends_the_job() -> None:
    play = Play().agent_joins(0).started(0).late()
    assert isinstance(play.state, Ending)
    assert play.sent(m.EndJob) == [m.EndJob(1, "nodes 1 did not start their ranks in time")]


# A fault, step by step


def test_death_is_reported_with_its_evidence() -> None:
    play = Play().training().dies(3)

    assert isinstance(play.state, Reported)
    [report] = play.sent(FaultReport)
    assert [(f.rank, f.kind, f.evidence) for f in report.faults] == [
        (3, "1", "signal 9, SIGKILL: boom")
    ]


def test_stop_order_parks_all_ranks() -> None:
    play = Play().stopping()

    assert play.last.commands[0] == SendMessage(
        EVERY_WORKER, m.Park(Incident(1), "incident 1: failed ranks: 3")
    )
    assert isinstance(play.state, Stopping)
    assert play.state.running == {0, 1, 2}


def test_stop_is_complete_when_the_last_survivor_has_parked() -> None:
    play = Play().stopping().parks(0, 1)
    assert not play.last.commands
    assert [(r.uuid, r.code) for r in play.parks(2).sent(StopReport)] == [("u1", 0)]


def test_rank_that_does_not_park_is_a_new_fault() -> None:
    play = Play().stopping().parks(0, 1).late()

    [report] = play.sent(FaultReport)
    assert [(f.rank, f.cause) for f in report.faults] == [(2, "stuck"), (3, "exited")]
    assert play.sent(StopReport)
    assert isinstance(play.state, Deciding)


def test_possible_strategies_are_reported_to_clusterd() -> None:
    play = Play().deciding().orders(ASK)
    [report] = play.sent(StrategiesReport)
    assert report.strategies == ("recover", "downgrade", "dump", "exit")


def test_recover_in_place_replaces_only_the_dead_rank() -> None:
    play = Play().deciding().orders(ASK).orders(IN_PLACE)

    replaced, repair = play.last.commands
    member = m.Member(Rank(3), NodeRank(1), Incarnation(1))
    assert replaced == SendMessage(
        agent(1), m.ReplaceWorkers(Incident(1), (member,), "host0:29500")
    )
    assert isinstance(repair, SendMessage)
    assert isinstance(repair.body, m.Repair)
    assert repair.to == EVERY_WORKER
    assert (repair.body.resume, repair.body.sources) == (7, {3: 2})
    assert repair.body.store == "host0:29500"


def test_replacement_gets_the_plan_after_its_hello() -> None:
    play = Play().repairing().started(1).hello(3, "joining")
    [repair] = play.sent(m.Repair)
    assert repair.sources == {3: 2}


def test_recovery_succeeds_when_all_ranks_have_committed_a_step() -> None:
    play = Play().repairing().started(1).hello(3, "joining")
    play.says(m.Repaired, 0, 1, 2, 3)
    assert isinstance(play.state, Resuming)
    play.says(m.Committed, 0, 1, 2, step=8)
    assert not play.sent(ResultReport)
    play.says(m.Committed, 3, step=8)
    assert isinstance(play.state, Training)
    assert [(r.code, r.strategy) for r in play.sent(ResultReport)] == [(0, "recover")]


def test_step_committed_before_others_are_repaired_counts() -> None:
    play = Play().repairing().started(1).hello(3, "joining").says(m.Committed, 0, 1, 2, 3, step=8)
    assert isinstance(play.state, Training)


def test_incident_record_has_all_phases() -> None:
    play = Play().repairing().started(1).hello(3, "joining")
    play.says(m.Repaired, 0, 1, 2, 3).says(m.Committed, 0, 1, 2, 3, step=8)

    [record] = play.state.job.past_incidents
    assert (record.incident, record.strategy, record.outcome) == (
        1,
        "recover-in-place",
        "recovered",
    )
    parts = record.phases_ms()
    assert list(parts) == ["stopped", "decided", "forked", "groups", "state", "step"]
    assert all(part >= 0 for part in parts.values())


# Faults during a recovery


def test_rank_that_dies_while_stopping_is_not_waited_for() -> None:
    play = Play().stopping().parks(0, 1).dies(2)
    assert isinstance(play.state, Deciding)
    assert play.sent(FaultReport)


def test_death_while_repairing_leads_back_to_reported() -> None:
    play = Play().repairing().dies(0)
    assert isinstance(play.state, Reported)

    play.orders(signal("stopTrain", "stop_train", incident=2, uuid="u2", sequence=4))
    assert isinstance(play.state, Stopping)
    assert play.state.job.incident == 2
    assert play.state.running == {1, 2}
    assert play.state.job.past_incidents[0].outcome == "superseded"


def test_replacement_that_never_started_gets_another_incarnation() -> None:
    play = Play().repairing().dies(0)
    play.orders(signal("stopTrain", "stop_train", incident=2, uuid="u2", sequence=4)).parks(1, 2)
    play.orders(replace(IN_PLACE, incident=Incident(2), uuid="u2", sequence=6))

    incarnations = {
        w.rank: w.incarnation for order in play.sent(m.ReplaceWorkers) for w in order.workers
    }
    assert incarnations == {0: 1, 3: 2}


def test_replies_to_an_older_incident_are_ignored() -> None:
    play = Play().repairing().dies(0)
    play.orders(signal("stopTrain", "stop_train", incident=2, uuid="u2", sequence=4))
    stale = m.Parked(Rank(1), Incarnation(0), Incident(1), Step(7), True)

    play.receive(worker(0, 1), stale)

    assert isinstance(play.state, Stopping)
    assert play.state.running == {1, 2}


def test_former_incarnation_is_ended_by_its_agent() -> None:
    play = Play().repairing()
    play.incarnations[3] = 0
    [order] = play.hello(3).sent(m.EndWorkers)
    assert order.workers == (m.Member(Rank(3), NodeRank(1), Incarnation(0)),)


def test_failed_collective_waits_for_the_death_that_explains_it() -> None:
    play = Play().training()
    failed = m.WorkerFailed(
        Rank(0), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
    )
    play.receive(worker(0, 0), failed)
    assert isinstance(play.state, Suspecting)
    assert not play.last.commands

    [report] = play.dies(3).sent(FaultReport)
    assert {f.rank: f.kind for f in report.faults} == {3: "1"}


def test_death_while_stopping_replaces_the_lost_connection_that_it_explains() -> None:
    """The agent sees the end of a large process later than its peers see the closed connection."""
    play = Play().training()
    failed = m.WorkerFailed(
        Rank(0), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
    )
    play.receive(worker(0, 0), failed).late().orders(STOP).parks(0, 1, 2)
    assert isinstance(play.state, Stopping)
    assert play.state.running == {3}, "a dying rank never parks"

    [report] = play.dies(3).sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [3]
    assert isinstance(play.state, Deciding)
    record = play.state.job.open_incident
    assert record is not None
    assert [fault.rank for fault in record.faults] == [3]


def test_failure_before_the_repair_that_arrives_after_it_is_ignored() -> None:
    play = Play().repairing().started(1).hello(3, "joining")
    play.says(m.Repaired, 0, 1, 2, 3).says(m.Committed, 0, 1, 2, 3, step=8)
    assert isinstance(play.state, Training)
    late = m.WorkerFailed(
        Rank(0), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
    )
    assert isinstance(play.receive(worker(0, 0), late).state, Training)
    new = replace(late, incident=Incident(1))
    assert isinstance(play.receive(worker(0, 0), new).state, Suspecting)


def test_ranks_that_fail_one_after_the_other_in_a_script_without_taskd_are_one_fault() -> None:
    play = Play().training(protected=False).dies(3).orders(STOP)
    assert isinstance(play.state, Deciding)
    assert not play.dies(0, code=1, signal=None).sent(FaultReport)
    assert isinstance(play.state, Deciding)
    assert play.step(NodeGone(NodeRank(0), "its liveness port is closed")).sent(FaultReport)


def test_failed_collective_without_a_death_is_a_network_fault_and_can_be_retried() -> None:
    play = Play().training()
    failed = m.WorkerFailed(
        Rank(0), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
    )
    [report] = play.receive(worker(0, 0), failed).late().sent(FaultReport)
    assert [(f.rank, f.kind) for f in report.faults] == [(0, "2")]

    play.orders(STOP).parks(0, 1, 2, 3).orders(ASK)
    assert play.sent(StrategiesReport)[0].strategies[0] == "retry"
    play.orders(change("retry"))
    [repair] = play.sent(m.Repair)
    assert (repair.strategy, repair.sources) == ("retry", {})


def test_no_wait_for_a_death_when_all_ranks_have_reported() -> None:
    play = Play().training()
    for rank in range(4):
        assert not play.sent(FaultReport)
        failed = m.WorkerFailed(
            Rank(rank), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
        )
        play.receive(worker(rank // 2, rank), failed)
    [report] = play.sent(FaultReport)
    assert {f.kind for f in report.faults} == {"2"}


def test_retry_repairs_a_corrupt_rank_from_a_peer() -> None:
    play = Play().training()
    failed = m.WorkerFailed(Rank(1), Incarnation(0), Incident(0), FaultCause.CORRUPT, "bits differ")
    play.receive(worker(0, 1), failed).orders(STOP).parks(0, 1, 2, 3).orders(change("retry"))
    [repair] = play.sent(m.Repair)
    assert repair.sources == {1: 0}


def stopped(rank: int, incarnation: int = 0) -> RankHung:
    return RankHung(Rank(rank), Incarnation(incarnation), "a signal stopped it", stopped=True)


def test_stopped_rank_is_not_waited_for_while_the_others_park() -> None:
    play = Play().stopping().parks(0, 1).step(stopped(2))
    assert isinstance(play.state, Deciding)
    assert [fault.rank for fault in play.sent(FaultReport)[0].faults] == [2, 3]


def test_replacement_that_is_stopped_during_the_repair_is_a_new_fault() -> None:
    play = Play().repairing().started(1).hello(3, "joining")
    assert isinstance(play.step(stopped(3, incarnation=0)).state, Repairing), "it was replaced"
    assert isinstance(play.step(stopped(3, incarnation=1)).state, Reported)


def test_hung_rank_is_replaced_without_parking() -> None:
    play = (
        Play()
        .training()
        .step(RankHung(Rank(2), Incarnation(0), "no progress for 9 s"))
        .orders(STOP)
    )
    assert isinstance(play.state, Stopping)
    assert play.state.running == {0, 1, 3}
    play.parks(0, 1, 3).orders(IN_PLACE)
    assert [w.rank for w in play.sent(m.ReplaceWorkers)[0].workers] == [2]


def stalled(*behind: int) -> JobStalled:
    evidence = "all 4 ranks wait for each other since 6.0 s\nrank 0 at step 7: in recv()"
    return JobStalled(tuple((Rank(rank), Incarnation(0)) for rank in behind), evidence)


def test_stalled_job_repeats_its_step() -> None:
    play = Play().training().step(stalled())
    [report] = play.sent(FaultReport)
    assert [(fault.rank, fault.kind) for fault in report.faults] == [(0, FaultKind.NETWORK)]
    play.orders(STOP).parks(0, 1, 2, 3).orders(ASK)
    assert play.sent(StrategiesReport)[0].strategies[0] == "retry"


def test_rank_that_is_behind_all_others_is_hung() -> None:
    [report] = Play().training().step(stalled(2)).sent(FaultReport)
    assert [(fault.rank, fault.cause) for fault in report.faults] == [(2, FaultCause.HUNG)]


def resuming() -> Play:
    play = Play().repairing().started(1).hello(3, "joining").says(m.Repaired, 0, 1, 2, 3)
    assert isinstance(play.state, Resuming)
    return play


def test_repair_after_which_no_rank_continues_fails_and_then_all_ranks_restart() -> None:
    play = resuming().step(stalled())
    assert isinstance(play.state, Deciding)
    [result] = play.sent(ResultReport)
    assert (result.code, result.strategy) == (406, "recover")
    assert "all 4 ranks wait for each other" in result.info
    assert "in recv()" not in result.info, "the stacks are in the log"
    play.orders(change("recover", uuid="u1b"))
    assert isinstance(play.state, Stopping)
    play.parks(0, 1, 2)
    assert isinstance(play.state, Restarting), "the same repair would end in the same way"
    assert play.state.job.open_incident is not None
    assert "no rank continued" in play.state.job.open_incident.because, "for the summary"


def test_replacement_that_hangs_after_the_repair_is_a_new_fault() -> None:
    play = resuming()
    assert isinstance(play.step(RankHung(Rank(3), Incarnation(0), "idle")).state, Resuming)
    assert isinstance(play.step(RankHung(Rank(3), Incarnation(1), "idle")).state, Reported)


def test_replacement_that_hangs_before_it_joins_is_a_new_fault() -> None:
    play = Play().repairing().started(1)
    assert isinstance(play.step(RankHung(Rank(0), Incarnation(0), "idle")).state, Repairing)
    assert isinstance(play.step(RankHung(Rank(3), Incarnation(1), "idle")).state, Reported)


def test_stall_is_ignored_while_the_ranks_are_parked_or_not_known() -> None:
    assert isinstance(Play().deciding().step(stalled()).state, Deciding)
    assert isinstance(Play().step(stalled()).state, Gathering)


def test_ranks_of_a_silent_node_are_lost() -> None:
    play = Play().training().step(NodeSilent(NodeRank(1), "no heartbeat for 2 s"))
    [report] = play.sent(FaultReport)
    assert [(f.rank, f.cause) for f in report.faults] == [(2, "silent"), (3, "silent")]


def test_disconnected_node_is_waited_for_only_briefly_when_it_is_the_last() -> None:
    play = Play().stopping().step(NodeDisconnected(NodeRank(1)))
    play.parks(0, 1)
    assert play.state.deadline - play.now < 1.0
    play.late()
    assert isinstance(play.state, Deciding)
    [report] = play.sent(FaultReport)
    assert [(f.rank, f.cause) for f in report.faults] == [(2, "silent"), (3, "exited")]


def test_node_that_reconnects_gets_the_full_time_again() -> None:
    play = Play().stopping().step(NodeDisconnected(NodeRank(1))).parks(0, 1)
    play.step(NodeConnected(NodeRank(1)))
    assert play.state.deadline - play.now > 10.0
    play.parks(2)
    assert isinstance(play.state, Deciding)


def test_agent_that_requests_a_start_again_has_lost_its_ranks() -> None:
    play = Play().training().receive(agent(1), m.RestartsLeft(3))
    assert isinstance(play.state, Reported)
    assert not play.sent(m.StartWorkers)


def test_two_failed_repairs_in_a_row_have_a_deadline() -> None:
    play = Play().repairing()
    failed = m.RepairFailed(Rank(1), Incarnation(0), Incident(1), "the source hung up")
    play.receive(worker(0, 1), failed)
    assert isinstance(play.state, Repairing)
    play.late()
    assert isinstance(play.state, Deciding)
    assert [r.code for r in play.sent(ResultReport)] == [406]


# The other strategies


def test_unprotected_ranks_are_all_restarted_and_use_one_restart() -> None:
    play = Play().training(protected=False).dies(3).orders(STOP)
    assert play.sent(StopReport)
    assert play.orders(ASK).sent(StrategiesReport)[0].strategies == ("recover", "exit")

    play.orders(IN_PLACE)

    assert isinstance(play.state, Restarting)
    orders = play.sent(m.RestartJob)
    assert [order.attempt for order in orders] == [1, 1]
    assert [[w.incarnation for w in order.workers] for order in orders] == [[1, 1], [1, 1]]
    assert play.state.job.restarts_left == 2
    play.incarnations = dict.fromkeys(range(4), 1)
    assert isinstance(play.started(0).started(1).state, Training)
    assert [r.code for r in play.sent(ResultReport)] == [0]
    (record,) = play.state.job.past_incidents
    assert (record.strategy, record.outcome) == ("recover-in-place", "restarted")


def test_only_exit_is_possible_when_the_restart_budget_is_used_up() -> None:
    play = Play(replace(CONFIG, max_restarts=1)).training(protected=False)
    for incident in (1, 2):
        play.dies(3)
        uuid = f"u{incident}"
        play.orders(signal("stopTrain", "stop_train", incident=incident, uuid=uuid))
        play.orders(signal("globalFault", "on_global_rank", incident=incident, uuid=uuid))
        if incident == 1:
            play.orders(change("recover", incident=1, uuid=uuid))
            play.incarnations = dict.fromkeys(range(4), 1)
            play.started(0).started(1)
    assert play.sent(StrategiesReport)[0].strategies == ("exit",)


def test_end_of_the_job_gives_the_reason_of_clusterd() -> None:
    play = Play().training().dies(3).orders(STOP).orders(ASK)
    order = replace(change("exit"), because="exit is chosen (recover: it has failed)")
    play.orders(order)
    (ended,) = play.sent(m.EndJob)[:1]
    assert ended.because == "no strategy is left: exit is chosen (recover: it has failed)"


# Errors of the script


BAD_BATCH = m.ScriptError(("ValueError", "Exception"), "train.py:12", "bad batch 7")
BAD_SHAPE = m.ScriptError(("ValueError", "Exception"), "train.py:60", "bad shape")
NO_FILE = m.ScriptError(("FileNotFoundError", "OSError"), "train.py:12", "no such file")
NO_MODULE = m.ScriptError(("ModuleNotFoundError", "ImportError"), "train.py:1", "no module")
PEER_LOST = m.ScriptError(("RuntimeError",), "graph.py:9", "Connection closed by peer [::1]:4")
EXIT_ONLY = ("exit",)


def offered(play: Play, incident: int) -> tuple[str, ...]:
    """The strategies that the manager offers once all ranks are parked."""
    uuid = f"u{incident}"
    play.orders(signal("stopTrain", "stop_train", incident=incident, uuid=uuid))
    play.orders(signal("globalFault", "on_global_rank", incident=incident, uuid=uuid))
    return play.sent(StrategiesReport)[0].strategies


def restarted(play: Play, incident: int) -> Play:
    play.orders(change("recover", incident=incident, uuid=f"u{incident}"))
    play.incarnations = dict.fromkeys(range(4), incident)
    return play.started(0).started(1)


@pytest.mark.parametrize(
    ("first", "second", "strategies"),
    [
        pytest.param(BAD_BATCH, replace(BAD_BATCH, message="bad 8"), EXIT_ONLY, id="same"),
        pytest.param(BAD_BATCH, BAD_SHAPE, ("recover", "exit"), id="elsewhere"),
        pytest.param(NO_FILE, NO_FILE, EXIT_ONLY, id="a file that does not come back"),
        pytest.param(PEER_LOST, PEER_LOST, ("recover", "exit"), id="only a symptom"),
    ],
)
def test_same_error_twice_without_progress_ends_the_job(
    first: m.ScriptError, second: m.ScriptError, strategies: tuple[str, ...]
) -> None:
    play = Play().training(protected=False).raises(3, first)
    assert offered(play, 1) == ("recover", "exit")
    restarted(play, 1).raises(3, second)
    assert offered(play, 2) == strategies


@pytest.mark.parametrize("failed", [1, 2])
def test_error_of_a_rank_that_is_being_replaced_is_not_forgotten(failed: int) -> None:
    """Its peers notice a lost connection before the second end of the rank is known.

    `failed`: which process of the rank fails again. The first one has been replaced by then.
    """
    play = Play().training().raises(3, BAD_BATCH, step=7)
    for incident in (1, 2, 3):
        assert not play.state.job.hopeless
        uuid = f"u{incident}"
        play.orders(signal("stopTrain", "stop_train", incident=incident, uuid=uuid)).parks(0, 1, 2)
        if incident < 3:
            play.orders(change("recover", extra="recover-in-place", incident=incident, uuid=uuid))
        if incident == 2:
            play.incarnations[3] = failed
            play.raises(3, BAD_BATCH, step=7)
    assert play.state.job.hopeless


def test_error_after_progress_is_not_a_repetition() -> None:
    play = Play().training(protected=False).raises(3, BAD_BATCH)
    offered(play, 1)
    restarted(play, 1)
    play.now += play.config.settled_s
    assert offered(play.raises(3, BAD_BATCH), 2) == ("recover", "exit")


def test_ranks_of_one_attempt_that_fail_in_turn_are_one_failure() -> None:
    play = Play().training(protected=False).raises(3, NO_FILE)
    offered(play, 1)
    assert offered(play.raises(2, NO_FILE), 2) == ("recover", "exit")


def test_killed_rank_explains_the_errors_of_the_others() -> None:
    play = Play().training(protected=False).dies(3).raises(2, BAD_BATCH)
    offered(play, 1)
    assert offered(restarted(play, 1).dies(3).raises(2, BAD_BATCH), 2) == ("recover", "exit")


@pytest.mark.parametrize(
    ("error", "ranks", "strategies"),
    [
        pytest.param(NO_MODULE, [3], EXIT_ONLY, id="in the source"),
        pytest.param(BAD_BATCH, [0, 1, 2, 3], EXIT_ONLY, id="in all ranks"),
        pytest.param(BAD_BATCH, [1, 2, 3], ("recover", "exit"), id="in some ranks"),
        pytest.param(NO_FILE, [0, 1, 2, 3], ("recover", "exit"), id="may pass"),
    ],
)
def test_error_before_the_first_step_may_end_the_job_at_once(
    error: m.ScriptError, ranks: list[int], strategies: tuple[str, ...]
) -> None:
    play = Play().training(protected=False)
    for rank in ranks:
        play.raises(rank, error)
    assert offered(play, 1) == strategies


def test_error_in_all_ranks_after_a_step_is_tried_again() -> None:
    play = Play().training(protected=False)
    for rank in range(4):
        play.raises(rank, BAD_BATCH, step=5)
    assert offered(play, 1) == ("recover", "exit")
    restarted(play, 1)
    for rank in range(4):
        play.raises(rank, BAD_BATCH, step=5)
    assert offered(play, 2) == EXIT_ONLY


def test_job_that_ends_for_an_error_names_it_first() -> None:
    play = Play().training(protected=False).raises(3, NO_MODULE)
    offered(play, 1)
    play.orders(change("exit", incident=1, uuid="u1"))
    (ended, *_) = play.sent(m.EndJob)
    assert ended.because.startswith("ModuleNotFoundError: no module (train.py:1): rank 3 failed")


@pytest.mark.parametrize(("error", "code"), [(BAD_BATCH, DO_NOT_REPLACE), (NO_FILE, 1)])
def test_exit_code_says_whether_a_later_start_may_help(error: m.ScriptError, code: int) -> None:
    play = Play().training(protected=False).raises(3, error)
    offered(play, 1)
    restarted(play, 1).raises(3, error)
    offered(play, 2)
    play.orders(change("exit", incident=2, uuid="u2"))
    assert {ended.exit_code for ended in play.sent(m.EndJob)} == {code}


def test_rank_that_is_killed_after_its_script_has_ended_is_finished() -> None:
    play = Play().training()
    for rank in (0, 1, 2):
        play.exits(rank, 0, None)
    play.exits(3, None, 6, script_ended=True)
    assert play.sent(m.EndJob) == [m.EndJob(0, "all ranks have finished")] * 2


def test_in_process_repair_uses_no_restart() -> None:
    assert Play().repairing().state.job.restarts_left == 3


def test_job_without_progress_is_not_repaired_forever() -> None:
    play = Play(replace(CONFIG, fruitless_limit=2)).training()
    strategies: list[tuple[str, ...]] = []
    for incident in (1, 2, 3):
        uuid = f"u{incident}"
        play.dies(3)
        play.orders(signal("stopTrain", "stop_train", incident=incident, uuid=uuid)).parks(0, 1, 2)
        play.orders(signal("globalFault", "on_global_rank", incident=incident, uuid=uuid))
        strategies += [play.sent(StrategiesReport)[0].strategies]
        if "recover" in strategies[-1]:
            play.orders(change("recover", incident=incident, uuid=uuid, extra="recover-in-place"))
            play.incarnations[3] = incident
            play.started(1).hello(3, "joining")
    assert [("recover" in offered) for offered in strategies] == [True, True, False]


def test_recover_waits_for_a_lost_node() -> None:
    play = Play(replace(CONFIG, rescheduling=True)).training()
    play.step(NodeSilent(NodeRank(1), "gone")).orders(STOP).parks(0, 1)
    play.orders(IN_PLACE)
    assert [r.code for r in play.sent(ResultReport)] == [406]
    play.orders(change("recover", uuid="u1b"))
    assert isinstance(play.state, Awaiting)
    play.agent_joins(1)
    assert isinstance(play.state, Repairing)
    assert [w.rank for w in play.state.plan.replaced] == [2, 3]


@pytest.mark.parametrize("how", ["lost", "died"])
def test_only_the_node_that_was_lost_has_to_leave_and_not_its_successor(how: str) -> None:
    play = Play(replace(CONFIG, rescheduling=True)).training()
    if how == "lost":
        play.step(NodeSilent(NodeRank(1), "gone")).orders(STOP)
        play.agent_joins(1).parks(0, 1)
    else:
        play.dies(3).orders(STOP).parks(0, 1, 2)
    play.orders(signal("globalFault", "fault_nodes_exit", sequence=2, nodes=(NodeRank(1),)))
    assert bool(play.sent(m.ExitAgent)) == (how == "died")
    play.orders(change("recover", uuid="u1b"))
    assert isinstance(play.state, Repairing if how == "lost" else Awaiting)


def test_shrinking_reports_the_isolated_ranks_and_continues_at_once() -> None:
    play = Play().training().step(NodeSilent(NodeRank(1), "gone")).orders(STOP).parks(0, 1)
    play.orders(change("downgrade", extra='{"scale-in-strategy": "DP"}'))

    assert isinstance(play.state, Repairing)
    assert play.state.job.world == {0, 1}
    [report] = play.sent(ResultReport)
    assert (report.code, report.isolated) == (201, (2, 3))
    play.says(m.Committed, 0, 1, step=8)
    assert [(r.code, r.strategy) for r in play.sent(ResultReport)] == [(0, "downgrade")]
    assert play.state.job.past_incidents[-1].strategy == "elastic-training", "as users name it"


def test_job_grows_back_when_the_node_returns() -> None:
    play = Play().training().step(NodeSilent(NodeRank(1), "gone")).orders(STOP).parks(0, 1)
    play.orders(change("downgrade")).says(m.Committed, 0, 1, step=8)
    play.receive(agent(1), m.AgentHello(NodeRank(1), "host1", (), ""))
    assert [offer.strategies for offer in play.sent(StrategiesReport)] == [("upgrade",)]
    play.receive(agent(1), m.RestartsLeft(3))
    assert not play.sent(m.StartWorkers)

    play.orders(change("upgrade", uuid="u2"))
    assert play.sent(m.Park) == [m.Park(Incident(2), "incident 2: failed ranks: none")]
    assert isinstance(play.state, Stopping)
    play.parks(0, 1, step=9)

    assert isinstance(play.state, Repairing)
    assert play.state.job.world == {0, 1, 2, 3}
    assert set(play.state.plan.sources) == {2, 3}
    assert play.state.plan.resume == 9


def test_dump_is_written_by_the_ranks_that_hold_the_step() -> None:
    play = Play().stopping().parks(0, 1, step=8).parks(2).orders(change("dump"))
    assert isinstance(play.state, Dumping)
    [dump] = play.sent(m.Dump)
    assert (dump.step, [member.rank for member in dump.members]) == (8, [0, 1])
    for rank in (0, 1):
        play.receive(worker(0, rank), m.Dumped(Rank(rank), Incident(1), Step(8)))
    assert [(r.code, r.strategy) for r in play.sent(ResultReport)] == [(0, "dump")]
    play.orders(replace(change("exit", extra="dump_exit"), sequence=9))
    assert isinstance(play.state, Ending)
    assert play.state.exit_code == 1
    assert "step 8 is written to taskd-dump" in play.state.because
    (record,) = play.state.job.past_incidents
    assert (record.strategy, record.outcome) == ("dump", "ended")


def test_failed_dump_is_reported() -> None:
    play = Play().deciding().orders(change("dump"))
    play.receive(worker(0, 0), m.Dumped(Rank(0), Incident(1), Step(7), "disk full"))
    assert [r.code for r in play.sent(ResultReport)] == [407]


def test_death_while_dumping_is_a_new_fault() -> None:
    play = Play().deciding().orders(change("dump")).dies(0)
    assert isinstance(play.state, Reported)


def test_save_and_exit_stops_writes_and_ends() -> None:
    play = Play().training().dies(3)
    play.orders(signal("saveAndExit", "save_and_exit")).parks(0, 1, 2)
    assert isinstance(play.state, Dumping)
    for rank in range(3):
        play.receive(worker(0, rank), m.Dumped(Rank(rank), Incident(1), Step(7)))
    assert isinstance(play.state, Ending)


def test_pause_for_an_operation_ends_with_continue() -> None:
    play = Play().training().orders(signal("stopTrain", "pause_train", sequence=1))
    play.parks(0, 1, 2, 3)
    assert isinstance(play.state, Paused)
    assert play.sent(StopReport)
    play.orders(change("continue")).says(m.Committed, 0, 1, 2, 3, step=8)
    assert isinstance(play.state, Training)
    assert [(r.code, r.strategy) for r in play.sent(ResultReport)] == [(0, "continue")]


def test_pause_ends_by_itself_after_its_deadline() -> None:
    play = Play().training().orders(signal("stopTrain", "pause_train", timeout_s=900))
    play.parks(0, 1, 2, 3).late()
    assert isinstance(play.state, Repairing)


def test_ranks_stop_before_their_device_is_reset() -> None:
    faults = (Fault(Rank(3)),)
    play = Play().training()
    play.orders(signal("preExitProcess", uuid="x", faults=faults, nodes=(NodeRank(1),)))
    assert play.last.commands == (SendMessage(agent(1), m.StopWorkers((Rank(3),))),)


# Endings


def test_job_finishes_when_all_ranks_have() -> None:
    play = Play().training()
    for rank in range(4):
        play.dies(rank, code=0, signal=None)
    assert play.sent(m.EndJob) == [m.EndJob(0, "all ranks have finished")] * 2
    play.step(NodeDisconnected(NodeRank(0))).step(NodeDisconnected(NodeRank(1)))
    assert isinstance(play.state, Ended)
    assert play.sent(Finish) == [Finish(0, "all ranks have finished")]


def test_manager_ends_although_agents_do_not_leave() -> None:
    play = Play().training().orders(signal("killMaster", uuid="k")).late()
    assert isinstance(play.state, Ended)
    assert play.state.exit_code == 1


def test_ascend_agents_exit_by_their_own_message() -> None:
    play = (
        Play(JobConfig())
        .receive(agent(0), m.AgentRegistered())
        .receive(agent(0), m.RestartsLeft(1))
    )
    play.receive(agent(0), m.RanksFailed((Rank(0),)))
    play.orders(signal("killMaster", uuid="k", incident=0))
    assert play.sent(m.ExitAgent) == [m.ExitAgent()]


def test_ascend_agents_restart_by_their_own_message() -> None:
    play = (
        Play(JobConfig())
        .receive(agent(0), m.AgentRegistered())
        .receive(agent(0), m.RestartsLeft(5))
    )
    play.receive(agent(0), m.RanksFailed((Rank(0),)))
    assert play.sent(FaultReport)
    play.orders(signal("stopTrain", "stop_train", incident=0))
    play.orders(signal("changeStrategy", incident=0, strategy="recover"))
    assert play.sent(m.RestartAgent) == [m.RestartAgent(4)]
    assert [r.code for r in play.sent(ResultReport)] == [0]


def _ascend_job(config: JobConfig, mindio: bool = False) -> Play:
    play = Play(config)
    play.state = machine.begin(config, 0.0, mindio)
    for node in range(config.nodes):
        play.receive(agent(node), m.AgentRegistered()).receive(agent(node), m.RestartsLeft(5))
    return play


def test_replaced_ascend_agent_starts_and_the_others_restart() -> None:
    play = _ascend_job(replace(CONFIG, rescheduling=True))
    play.receive(agent(1), m.RanksFailed(()))
    play.orders(signal("stopTrain", "stop_train", incident=0))
    play.orders(signal("changeStrategy", incident=0, strategy="recover"))
    assert isinstance(play.state, Awaiting)
    play.receive(agent(1), m.AgentRegistered()).receive(agent(1), m.RestartsLeft(5))
    assert {(c.to, c.body) for c in play.last.commands if isinstance(c, SendMessage)} == {
        (agent(0), m.RestartAgent(4)),
        (agent(1), m.StartWorkers(4)),
    }
    assert isinstance(play.state, Training)


@pytest.mark.parametrize("reported", [3, 1], ids=["global", "local"])
def test_mindspore_agents_of_ascend_report_local_ranks(reported: int) -> None:
    """PyTorch's agents report global ranks. No agent can report a rank of another node."""
    play = _ascend_job(CONFIG)
    play.receive(agent(1), m.RanksFailed((Rank(reported), Rank(9))))
    [report] = play.sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [3]


def test_mindspore_agents_of_ascend_have_no_restart_budget() -> None:
    """They always send 1, and ignore the number that they get."""
    play = Play(JobConfig(mindspore=True))
    play.receive(agent(0), m.AgentRegistered()).receive(agent(0), m.RestartsLeft(1))
    assert play.sent(m.StartWorkers) == [m.StartWorkers(32767)]
    for number in range(3):
        play.receive(agent(0), m.RanksFailed((Rank(0),)))
        play.orders(signal("stopTrain", "stop_train", uuid=f"u{number}", incident=0))
        play.orders(signal("changeStrategy", uuid=f"u{number}", incident=0, strategy="recover"))
        assert play.sent(m.RestartAgent)


def test_replaced_agent_is_not_a_fault_while_mindio_repairs_the_ranks() -> None:
    play = _ascend_job(CONFIG, mindio=True)
    play.receive(agent(1), m.AgentRegistered()).receive(agent(1), m.RestartsLeft(5))
    assert play.sent(m.StartWorkers) == [m.StartWorkers(5)]
    assert not play.sent(FaultReport)
    assert isinstance(play.state, Training)


# Signals


def test_hot_switch_is_refused_at_once() -> None:
    """Otherwise clusterd waits for a job that never pauses, and then restarts it."""
    play = Play().training()
    asked = signal("hot-switch", "hot switch", uuid="h", sequence=4)
    for _ in range(2):
        assert play.orders(asked).sent(StrategiesReport) == [StrategiesReport(("exit",), "h")]
    assert isinstance(play.state, Training)
    play.orders(signal("hot-switch", "stop switch", uuid="h", sequence=5))
    assert not play.last.commands
    # Ascend's clusterd would take the answer for one to a later question.
    play.orders(signal("hot-switch", "hot switch", uuid="", incident=0))
    assert not play.last.commands


def test_repeated_signal_is_carried_out_once() -> None:
    play = Play().stopping().orders(STOP)
    assert not play.last.commands


def test_manager_numbers_incidents_for_a_clusterd_that_does_not() -> None:
    play = Play().training().dies(3)
    play.orders(signal("stopTrain", "stop_train", incident=0, uuid="a"))
    assert play.state.job.incident == 1
    play.parks(0, 1, 2).orders(signal("changeStrategy", incident=0, uuid="a", strategy="recover"))
    play.incarnations[3] = 1
    play.dies(0)
    assert [r.code for r in play.sent(ResultReport)] == [406]
    play.orders(signal("stopTrain", "stop_train", incident=0, uuid="b"))
    assert play.state.job.incident == 2


def test_manager_continues_the_count_of_a_clusterd_that_lost_it() -> None:
    play = Play().repairing().started(1).hello(3, "joining").says(m.Committed, 0, 1, 2, 3, step=8)
    play.dies(0).orders(signal("stopTrain", "stop_train", incident=1, uuid="fresh"))
    assert play.state.job.incident == 2
    play.parks(1, 2, 3, step=9)
    play.orders(signal("changeStrategy", incident=1, uuid="turn2", strategy="recover"))
    assert isinstance(play.state, Repairing)


def test_order_of_an_older_incident_is_ignored() -> None:
    play = Play().repairing().dies(0)
    play.orders(signal("stopTrain", "stop_train", incident=2, uuid="u2", sequence=4))
    play.orders(replace(IN_PLACE, sequence=5))
    assert isinstance(play.state, Stopping)


def test_next_strategy_comes_with_a_new_uuid() -> None:
    play = Play().deciding().orders(IN_PLACE)
    play.late()
    play.orders(change("dump", uuid="u1b"))
    assert isinstance(play.state, Stopping), "the ranks have continued since they parked"
    play.parks(0, 1, 2)
    assert isinstance(play.state, Dumping)
    assert play.state.job.uuid == "u1b"


def test_fault_is_reported_again_after_clusterd_was_away() -> None:
    play = Play().training().dies(3).step(Subscribed())
    assert play.sent(FaultReport)


def test_job_ends_when_clusterd_does_not_answer_for_too_long() -> None:
    play = Play().training().dies(3)
    while isinstance(play.state, Reported):
        play.late()
    assert isinstance(play.state, Ending)
    assert play.now == pytest.approx(CONFIG.lost_contact_s, rel=0.1)


def test_repeated_order_is_answered_again() -> None:
    play = Play().deciding()
    [stopped] = play.orders(STOP).sent(StopReport)
    assert (stopped.code, stopped.uuid) == (0, STOP.uuid)
    [possible] = play.orders(ASK).sent(StrategiesReport)
    assert play.orders(ASK).sent(StrategiesReport) == [possible]
    play.orders(IN_PLACE)
    assert not play.orders(IN_PLACE).last.commands, "it is being carried out"
    play.incarnations[3] = 1
    play.hello(3, "joining").says(m.Repaired, 0, 1, 2, 3).says(m.Committed, 0, 1, 2, 3, step=8)
    assert isinstance(play.state, Training)
    [result] = play.orders(IN_PLACE).sent(ResultReport)
    assert (result.code, result.strategy) == (0, "recover")
    assert isinstance(play.state, Training)


def test_failed_strategy_is_not_the_answer_to_the_next_order() -> None:
    play = Play().repairing().late()
    assert [report.code for report in play.sent(ResultReport)] == [406]
    following = replace(change("recover"), sequence=4)
    play.orders(following)
    assert not play.orders(following).sent(ResultReport)


# A manager that was restarted


def rebuilt() -> Play:
    play = Play()
    play.state = machine.begin(CONFIG, 100.0)
    play.now = 100.0
    return play


def test_restarted_manager_does_nothing_when_all_ranks_train() -> None:
    play = rebuilt().agent_joins(0, running=True).agent_joins(1, running=True)
    assert isinstance(play.state, Gathering)
    for rank in range(4):
        play.hello(rank)
        assert not play.last.commands
    assert isinstance(play.state, Training)


def test_restarted_manager_counts_on_when_clusterd_begins_again_with_it() -> None:
    """Both were on a node that is back: the ranks train under incident 1, and obey only newer."""
    play = rebuilt()
    play.state = with_job(play.state, incident=Incident(1))
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    for rank in range(4):
        play.hello(rank)
    play.dies(3).orders(STOP)
    assert play.state.job.incident == 2
    assert [order.incident for order in play.sent(m.Park)] == [2]


def test_restarted_manager_decides_nothing_before_its_view_is_complete() -> None:
    play = rebuilt().orders(IN_PLACE)
    assert isinstance(play.state, Gathering)
    play.agent_joins(0, running=True).agent_joins(1, running=True).dies(3)
    for rank in range(3):
        play.hello(rank, "parked")
    assert isinstance(play.state, Stopping)
    play.parks(0, 1, 2)
    assert isinstance(play.state, Repairing)


def test_messages_for_the_former_manager_are_not_acted_on_yet() -> None:
    play = rebuilt()
    failed = m.WorkerFailed(
        Rank(0), Incarnation(0), Incident(0), FaultCause.COMMUNICATION, "peer reset"
    )
    play.receive(worker(0, 0), failed).dies(3)
    assert isinstance(play.state, Gathering)
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    for rank in range(3):
        play.hello(rank)
    [report] = play.sent(FaultReport)
    assert [fault.rank for fault in report.faults] == [3]
    play.orders(STOP).parks(0, 1, 2).orders(ASK)
    assert play.sent(StrategiesReport)[0].strategies[0] == "recover"
    assert "dump" in play.sent(StrategiesReport)[0].strategies


def test_old_replies_do_not_replace_a_hello() -> None:
    play = rebuilt().agent_joins(0, running=True).agent_joins(1, running=True)
    for rank in range(3):
        play.hello(rank)
    play.parks(3)
    assert isinstance(play.state, Gathering), "whether rank 3 is protected is not known yet"
    assert isinstance(play.hello(3).state, Training)


def test_joining_replacement_counts_as_parked() -> None:
    play = rebuilt()
    play.incarnations[3] = 1
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    play.state = replace(play.state, job=replace(play.state.job, incident=Incident(1)))
    play.orders(IN_PLACE)
    for rank in range(3):
        play.hello(rank, "parked")
    play.hello(3, "joining")
    assert isinstance(play.state, Stopping)
    assert play.state.running == {0, 1, 2}
    play.parks(0, 1, 2)
    assert isinstance(play.state, Repairing)
    assert play.state.plan.replaced == ()
    assert play.state.plan.sources == {3: 2}


def test_restarted_manager_accepts_a_repair_that_finished_without_it() -> None:
    play = rebuilt()
    play.incarnations[3] = 1
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    play.state = replace(play.state, job=replace(play.state.job, incident=Incident(1)))
    play.orders(IN_PLACE)
    for rank in range(4):
        play.hello(rank, "training")
    assert isinstance(play.state, Training)
    assert [r.code for r in play.sent(ResultReport)] == [0]


def test_ranks_that_are_repaired_are_not_asked_to_park_under_the_same_number() -> None:
    """They would ignore it, and count as stuck."""
    play = rebuilt()
    play.incarnations[3] = 1
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    play.state = replace(play.state, job=replace(play.state.job, incident=Incident(1)))
    for rank in range(4):
        play.hello(rank, "parked")
    for rank in range(4):
        play.says(m.Repaired, rank, step=7)
    assert isinstance(play.state, Training)
    play.orders(IN_PLACE)
    assert not play.sent(m.Park)
    assert isinstance(play.state, Training)
    assert [r.code for r in play.sent(ResultReport)] == [0]


def test_half_done_repair_starts_again_as_a_new_incident() -> None:
    play = rebuilt()
    play.incarnations[3] = 1
    play.agent_joins(0, running=True).agent_joins(1, running=True)
    play.state = replace(play.state, job=replace(play.state.job, incident=Incident(1)))
    play.orders(IN_PLACE)
    for rank, phase in enumerate(("training", "training", "parked", "joining")):
        play.hello(rank, phase)
    assert isinstance(play.state, Reported)
    [report] = play.sent(FaultReport)
    assert [(f.rank, f.kind) for f in report.faults] == [(2, "2"), (3, "2")]


def test_node_that_does_not_reconnect_to_a_restarted_manager_is_silent() -> None:
    play = rebuilt().agent_joins(0, running=True).hello(0).hello(1).late()
    [report] = play.sent(FaultReport)
    assert [(f.rank, f.cause) for f in report.faults] == [(2, "silent"), (3, "silent")]
