"""The worker's machine: one rank through a fault, step by step."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from taskd.core.agent.states import WorkersConfig
from taskd.core.manager.states import JobConfig
from taskd.core.worker import states
from taskd.core.worker.machine import step
from taskd.core.worker.states import Outcome, State, WorkerConfig
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.types import Tick
from taskd.model.worker import (
    AbortCollectives,
    CopiesChanged,
    DumpFinished,
    Event,
    ExecuteOrder,
    FirstStepCommitted,
    GiveUp,
    Identity,
    LocalRepairDone,
    LocalRepairFailed,
    ManagerConnected,
    SendToManager,
    ShardKnown,
    StepFailed,
    ThreadParked,
)

ME = Identity(Rank(2), NodeRank(0), Incarnation(0), 42)
CONFIG = WorkerConfig()
ONE, TWO = Incident(1), Incident(2)
AT_SEVEN = ThreadParked(Step(7), whole=True)


def plan(incident: Incident = ONE, me: Identity = ME) -> m.Repair:
    member = m.Member(me.rank, me.node, me.incarnation)
    return m.Repair(incident, "recover", (member,), Step(7), {}, "store:1", 30.0)


def walk(state: State, *events: Event, now: float = 0.0) -> Outcome:
    outcome = Outcome(state)
    for event in events:
        outcome = step(outcome.state, event, now, CONFIG)
    return outcome


def training(incident: int = 0) -> State:
    return states.Training(ME, Incident(incident))


def parked(incident: Incident = ONE) -> State:
    return walk(training(), m.Park(incident, "a test"), AT_SEVEN).state


def test_park_aborts_collectives_and_reports_the_step() -> None:
    ordered = walk(training(), m.Park(ONE, "rank 3 died"))
    assert ordered.commands == (AbortCollectives(ONE, "rank 3 died"),)
    parked = walk(ordered.state, AT_SEVEN)
    assert parked.commands == (
        SendToManager(m.Parked(ME.rank, ME.incarnation, ONE, Step(7), True)),
    )


def test_first_step_after_the_repair_ends_the_incident() -> None:
    ordered = walk(parked(), plan())
    assert ordered.commands == (ExecuteOrder(plan()),)
    repaired = walk(ordered.state, LocalRepairDone(ONE, Step(7), 0.1, 0.2))
    assert repaired.commands == (
        SendToManager(m.Repaired(ME.rank, ME.incarnation, ONE, Step(7), 0.1, 0.2)),
    )
    stepped = walk(repaired.state, FirstStepCommitted(Step(8)))
    assert stepped.commands == (SendToManager(m.Committed(ME.rank, ME.incarnation, ONE, Step(8))),)
    assert isinstance(stepped.state, states.Training)


@pytest.mark.parametrize(
    "late",
    [
        m.Park(ONE, "late"),
        plan(ONE),
        LocalRepairDone(ONE, Step(7)),
        LocalRepairFailed(ONE, "late"),
        m.Dump(ONE, Step(7), "/tmp", ()),
        m.Leave(ONE, "late"),
        DumpFinished(ONE, Step(7)),
    ],
)
def test_events_of_an_older_incident_are_rejected(late: Event) -> None:
    for state in (training(2), parked(TWO), walk(parked(TWO), plan(TWO)).state):
        outcome = walk(state, late)
        assert outcome.state == state
        assert outcome.commands == ()
        assert "older incident" in outcome.because


def test_newer_incident_interrupts_a_repair() -> None:
    repairing = walk(parked(), plan()).state
    outcome = walk(repairing, m.Park(TWO, "again"))
    assert isinstance(outcome.state, states.Parking)
    assert outcome.commands == (AbortCollectives(TWO, "again"),)
    after = walk(outcome.state, LocalRepairFailed(ONE, "interrupted"), AT_SEVEN)
    assert after.commands == (SendToManager(m.Parked(ME.rank, ME.incarnation, TWO, Step(7), True)),)


def test_own_fault_is_reported_once_and_waits_for_its_incident() -> None:
    failed = walk(training(), StepFailed(FaultCause.COMMUNICATION, "connection closed"))
    report = m.WorkerFailed(
        ME.rank, ME.incarnation, Incident(0), FaultCause.COMMUNICATION, "connection closed"
    )
    assert failed.commands == (SendToManager(report),)
    assert walk(failed.state, StepFailed(FaultCause.COMMUNICATION, "echo")).commands == ()
    waiting = walk(failed.state, AT_SEVEN)
    assert waiting.commands == ()
    ordered = walk(waiting.state, m.Park(ONE, "parked"))
    assert SendToManager(m.Parked(ME.rank, ME.incarnation, ONE, Step(7), True)) in ordered.commands


def test_replacement_can_get_its_plan_before_its_first_step() -> None:
    joining: State = states.Joining(ME, ONE)
    waiting = walk(joining, plan())
    assert waiting.commands == ()
    ready = walk(waiting.state, ThreadParked(Step(0), whole=False))
    assert ready.commands == (ExecuteOrder(plan()),)


def test_replacement_without_a_plan_reports_that_it_is_ready() -> None:
    ready = walk(states.Joining(ME, ONE), ThreadParked(Step(0), whole=False))
    assert ready.commands == (
        SendToManager(m.Parked(ME.rank, ME.incarnation, ONE, Step(0), False)),
    )


def test_joining_replacement_parks_at_once() -> None:
    outcome = walk(states.Joining(ME, ONE, plan()), m.Park(TWO, "another died"))
    assert outcome.commands == (
        SendToManager(m.Parked(ME.rank, ME.incarnation, TWO, Step(0), False)),
    )
    assert outcome.state == states.Joining(ME, TWO)


def test_second_incident_gets_the_current_list_of_snapshots() -> None:
    """While this rank was parked, another rank finished its copy and died."""
    late = (m.Copy("3of4", Step(7)),)
    for before in (parked(), states.Joining(ME, ONE)):
        ordered = walk(before, CopiesChanged(late), m.Park(TWO, "another one"))
        said = [command.body for command in ordered.commands if isinstance(command, SendToManager)]
        assert [body.copies for body in said if isinstance(body, m.Parked)] == [late]
    assert walk(training(), CopiesChanged(late)).state == training()


def test_plan_for_another_incarnation_is_ignored() -> None:
    other = replace(ME, incarnation=Incarnation(1))
    outcome = walk(parked(), plan(me=other))
    assert outcome.state == parked()


def test_all_reports_are_repeated_after_a_reconnect() -> None:
    assert _bodies(walk(training(3), ManagerConnected(Step(5)))) == [m.WorkerHello]
    assert _bodies(walk(parked(), ManagerConnected(Step(7)))) == [m.WorkerHello, m.Parked]
    resumed = walk(parked(), plan(), LocalRepairDone(ONE, Step(7))).state
    assert _bodies(walk(resumed, ManagerConnected(Step(7)))) == [m.WorkerHello, m.Repaired]
    after = walk(resumed, FirstStepCommitted(Step(8))).state
    assert _bodies(walk(after, ManagerConnected(Step(8)))) == [m.WorkerHello, m.Committed]
    faulted = walk(training(), StepFailed(FaultCause.CORRUPT, "a bit flipped")).state
    assert _bodies(walk(faulted, ManagerConnected(Step(7)))) == [m.WorkerHello, m.WorkerFailed]


def _bodies(outcome: Outcome) -> list[type]:
    return [
        type(command.body) for command in outcome.commands if isinstance(command, SendToManager)
    ]


def test_shard_is_reported_as_soon_as_it_is_known() -> None:
    outcome = walk(training(), ShardKnown("shard 1", 3, Step(0)))
    (said,) = outcome.commands
    assert isinstance(said, SendToManager)
    assert isinstance(said.body, m.WorkerHello)
    assert (said.body.shard, said.body.replica) == ("shard 1", 3)


def test_every_wait_has_a_deadline() -> None:
    late = 1e9
    parking = walk(training(), m.Park(ONE, "a test")).state
    assert walk(parking, Tick(), now=late).commands[0] == AbortCollectives(
        ONE, "the training thread has not parked yet"
    )
    for waiting in (parked(), walk(training(), StepFailed(FaultCause.COMMUNICATION, "lost")).state):
        assert waiting.deadline < inf
        outcome = walk(waiting, Tick(), now=late)
        assert isinstance(outcome.state, states.Leaving)
        assert isinstance(outcome.commands[-1], GiveUp)
    repairing = walk(parked(), plan()).state
    outcome = walk(repairing, Tick(), now=late)
    assert isinstance(outcome.state, states.Faulted)
    assert _bodies(outcome) == [m.RepairFailed]


def test_dump_is_reported_and_the_process_leaves() -> None:
    order = m.Dump(ONE, Step(7), "/last", (m.Member(ME.rank, ME.node, ME.incarnation),))
    ordered = walk(parked(), order)
    assert ordered.commands == (ExecuteOrder(order),)
    wrote = walk(ordered.state, DumpFinished(ONE, Step(7)))
    assert wrote.commands == (SendToManager(m.Dumped(ME.rank, ONE, Step(7))),)
    assert _bodies(walk(wrote.state, ManagerConnected(Step(7)))) == [m.Dumped]


def test_leave_ends_the_process_from_every_state() -> None:
    for state in (training(), parked(), walk(parked(), plan()).state):
        leave = m.Leave(TWO, "the job shrinks")
        outcome = walk(state, leave)
        assert isinstance(outcome.state, states.Leaving)
        assert outcome.commands == (AbortCollectives(TWO, "the job shrinks"), ExecuteOrder(leave))


@pytest.mark.parametrize(
    "name", ["answer_timeout_s", "nudge_s", "order_timeout_s", "dump_timeout_s"]
)
def test_timeouts_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        WorkerConfig(**{name: 0.0})


def test_rank_that_failed_waits_as_long_as_others_wait_for_clusterd_and_etcd() -> None:
    assert WorkerConfig().answer_timeout_s >= JobConfig().lost_contact_s
    assert WorkerConfig().answer_timeout_s > WorkersConfig().order_timeout_s
