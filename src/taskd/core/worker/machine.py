"""The worker's state machine: how one training process parks, is repaired and resumes.

The states are in `states.py`. Events of an older incident are rejected in one place, `_is_stale`.
`worker/manager_connection.py` runs this machine beside the training thread;
`repair_plan.py` makes the plans that it carries out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from taskd.core.worker.states import (
    Dumping,
    Faulted,
    Joining,
    Leaving,
    Outcome,
    Parked,
    Parking,
    Repairing,
    Resumed,
    State,
    Training,
    WorkerConfig,
)
from taskd.model import messages as m
from taskd.model.faults import FaultCause
from taskd.model.ids import Step
from taskd.model.types import Tick
from taskd.model.worker import (
    AbortCollectives,
    Command,
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


def step(state: State, event: Event, now: float, config: WorkerConfig) -> Outcome:
    """Decide what to do. Deterministic: the same input always gives the same outcome."""
    if isinstance(state, Leaving):
        return _repeat_report(state, event)
    if _is_stale(state, event):
        return Outcome(state, because=f"{type(event).__name__} is from an older incident")
    match event:
        case ManagerConnected(step=at):
            return Outcome(
                state, _hello(state, at), "connected: the manager gets this rank's state"
            )
        case ShardKnown(shard=shard, replica=replica, step=committed, own_since=own):
            described = replace(state.identity, shard=shard, replica=replica, own_since=own)
            if described == state.identity:
                return Outcome(state, because="the shard of this rank has not changed")
            state = replace(state, identity=described)
            return Outcome(state, _hello(state, committed), "the shard of this rank is known now")
        case m.Park():
            return _park(state, event, now, config)
        case m.Repair():
            return _repair(state, event, now)
        case m.Dump():
            return _dump(state, event, now, config)
        case m.Leave(incarnation=target) if target not in (-1, state.identity.incarnation):
            return Outcome(state, because=f"the order is for incarnation {target} of this rank")
        case m.Leave(incident=incident, because=because):
            commands = (AbortCollectives(incident, because), ExecuteOrder(event))
            return Outcome(Leaving(state.identity, incident), commands, because)
        case StepFailed():
            return _failed(state, event, now, config)
        case ThreadParked():
            return _thread_parked(state, event, now, config)
        case CopiesChanged(copies=copies):
            return _copies_changed(state, copies)
        case LocalRepairDone():
            return _repair_done(state, event)
        case LocalRepairFailed():
            return _repair_failed(state, event, now, config)
        case FirstStepCommitted():
            return _first_step_committed(state, event)
        case DumpFinished():
            return _dump_finished(state, event)
        case Tick():
            return _deadline_passed(state, now, config)
        case _:
            assert_never(event)


def _is_stale(state: State, event: Event) -> bool:
    fenced = (
        m.Park | m.Repair | m.Dump | m.Leave | LocalRepairDone | LocalRepairFailed | DumpFinished
    )
    return isinstance(event, fenced) and event.incident < state.incident


# The manager's orders


def _park(state: State, order: m.Park, now: float, config: WorkerConfig) -> Outcome:
    me, incident = state.identity, order.incident
    if incident == state.incident:
        if isinstance(state, Parked):
            return Outcome(state, (_parked_message(state),), "the order to park is repeated")
        if isinstance(state, Joining):
            return Outcome(state, (_parked_without_state(state),), "the order to park is repeated")
        return Outcome(state, because=f"incident {incident} is known already")
    match state:
        case Joining():
            # It has no step to abandon.
            joining = Joining(me, incident, copies=state.copies)
            return Outcome(
                joining, (_parked_without_state(joining),), "this rank has not started to train"
            )
        case Parked(at=at) | Faulted(at=ThreadParked() as at):
            parked = Parked(me, incident, at, now + config.order_timeout_s)
            return Outcome(
                parked,
                (AbortCollectives(incident, order.because), _parked_message(parked)),
                order.because,
            )
        case Training() | Resumed() | Repairing() | Parking() | Faulted():
            parking = Parking(me, incident, now + config.nudge_s)
            return Outcome(parking, (AbortCollectives(incident, order.because),), order.because)
        case Dumping():
            return Outcome(state, because="the emergency checkpoint is being written")
        case Leaving():
            return Outcome(state)
        case _:
            assert_never(state)


def _repair(state: State, plan: m.Repair, now: float) -> Outcome:
    match state:
        case _ if not _is_member(state.identity, plan):
            return Outcome(state, because="this incarnation is not a member of the plan")
        case Joining():
            joining = Joining(state.identity, plan.incident, plan, state.copies)
            return Outcome(joining, because="the plan has come before the first step")
        case Parked() if plan.incident == state.incident:
            return _carry_out(state.identity, plan, now)
        case Resumed() if plan.incident == state.incident:
            return Outcome(
                state, (_repaired_message(state),), "this plan has been carried out already"
            )
        case _:
            return Outcome(
                state, because=f"a plan cannot be carried out in state {type(state).__name__}"
            )


def _carry_out(me: Identity, plan: m.Repair, now: float) -> Outcome:
    if me.rank in plan.shards:
        me = replace(me, shard=plan.shards[me.rank], own_since=plan.own_since)
    repairing = Repairing(me, plan.incident, plan, now + plan.timeout_s)
    because = f"{plan.strategy}: {len(plan.members)} ranks resume at step {plan.resume}"
    return Outcome(repairing, (ExecuteOrder(plan),), because)


def _is_member(me: Identity, plan: m.Repair) -> bool:
    return any(one.rank == me.rank and one.incarnation == me.incarnation for one in plan.members)


def _dump(state: State, order: m.Dump, now: float, config: WorkerConfig) -> Outcome:
    if not isinstance(state, Parked) or order.incident != state.incident:
        return Outcome(state, because="only a parked rank can write a checkpoint")
    if all(one.rank != state.identity.rank for one in order.members):
        return Outcome(state, because="other ranks write the checkpoint")
    dumping = Dumping(state.identity, state.incident, now + config.dump_timeout_s)
    return Outcome(dumping, (ExecuteOrder(order),), f"writing step {order.step}")


# Events of the training thread


def _failed(state: State, failed: StepFailed, now: float, config: WorkerConfig) -> Outcome:
    if not isinstance(state, Training | Resumed):
        return Outcome(state, because="a fault is being dealt with already")
    me = state.identity
    report = m.WorkerFailed(me.rank, me.incarnation, state.incident, failed.kind, failed.evidence)
    faulted = Faulted(me, state.incident, report, None, now + config.answer_timeout_s)
    return Outcome(faulted, (SendToManager(report),), f"{failed.kind}: {failed.evidence}")


def _thread_parked(state: State, at: ThreadParked, now: float, config: WorkerConfig) -> Outcome:
    limit = now + config.order_timeout_s
    match state:
        case Parking() | Parked():
            parked = Parked(state.identity, state.incident, at, limit)
            return Outcome(parked, (_parked_message(parked),), f"parked at step {at.step}")
        case Joining(plan=plan):
            if plan is not None:
                return _carry_out(state.identity, plan, now)
            parked = Parked(state.identity, state.incident, at, limit)
            return Outcome(parked, (_parked_message(parked),), "ready to receive state")
        case Faulted():
            return Outcome(replace(state, at=at), because="parked before the order came")
        case Training() | Resumed():
            outcome = _failed(
                state, StepFailed(FaultCause.COMMUNICATION, "the step was aborted"), now, config
            )
            assert isinstance(outcome.state, Faulted)
            return replace(outcome, state=replace(outcome.state, at=at))
        case Repairing() | Dumping() | Leaving():
            return Outcome(state, because="the training thread already has an order")
        case _:
            assert_never(state)


def _copies_changed(state: State, copies: tuple[m.Copy, ...]) -> Outcome:
    because = "the list of snapshots is updated"
    match state:
        case Joining():
            return Outcome(replace(state, copies=copies), because=because)
        case Parked(at=at) | Faulted(at=ThreadParked() as at):
            return Outcome(replace(state, at=replace(at, copies=copies)), because=because)
        case _:
            return Outcome(
                state, because="the list of snapshots is read again when this rank parks"
            )


def _repair_done(state: State, done: LocalRepairDone) -> Outcome:
    if not isinstance(state, Repairing) or done.incident != state.incident:
        return Outcome(state, because="this repair plan was abandoned")
    resumed = Resumed(replace(state.identity, without=state.plan.without), state.incident, done)
    return Outcome(resumed, (_repaired_message(resumed),), f"resumes at step {done.step}")


def _repair_failed(
    state: State, failure: LocalRepairFailed, now: float, config: WorkerConfig
) -> Outcome:
    if not isinstance(state, Repairing) or failure.incident != state.incident:
        return Outcome(state, because="this repair plan was abandoned")
    me = state.identity
    report = m.RepairFailed(me.rank, me.incarnation, state.incident, failure.because)
    faulted = Faulted(me, state.incident, report, None, now + config.answer_timeout_s)
    return Outcome(faulted, (SendToManager(report),), failure.because)


def _first_step_committed(state: State, event: FirstStepCommitted) -> Outcome:
    if not isinstance(state, Resumed):
        return Outcome(state, because="only the first step after a repair is reported")
    me = state.identity
    proof = m.Committed(me.rank, me.incarnation, state.incident, event.step)
    because = f"step {event.step} is committed: incident {state.incident} is over"
    return Outcome(Training(me, state.incident, proof), (SendToManager(proof),), because)


def _dump_finished(state: State, finished: DumpFinished) -> Outcome:
    if not isinstance(state, Dumping):
        return Outcome(state, because="no checkpoint was ordered")
    report = m.Dumped(state.identity.rank, finished.incident, finished.step, finished.because)
    because = finished.because or f"step {finished.step} is written"
    return Outcome(
        Leaving(state.identity, state.incident, report), (SendToManager(report),), because
    )


# Deadlines, and repeated reports


def _deadline_passed(state: State, now: float, config: WorkerConfig) -> Outcome:
    if now < state.deadline:
        return Outcome(state, because="the deadline has not passed yet")
    match state:
        case Parking():
            nudged = replace(state, deadline=now + config.nudge_s)
            because = "the training thread has not parked yet"
            return Outcome(nudged, (AbortCollectives(state.incident, because),), because)
        case Faulted() | Parked():
            because = f"no order came in time in state {type(state).__name__}"
            return Outcome(Leaving(state.identity, state.incident), (GiveUp(because),), because)
        case Repairing():
            late = _repair_failed(
                state, LocalRepairFailed(state.incident, "the repair took too long"), now, config
            )
            return replace(
                late, commands=(AbortCollectives(state.incident, late.because), *late.commands)
            )
        case Dumping():
            finished = DumpFinished(state.incident, Step(0), "writing took too long")
            late = _dump_finished(state, finished)
            return replace(late, commands=(*late.commands, GiveUp(late.because)))
        case Joining() | Training() | Resumed() | Leaving():
            return Outcome(state, because="this state has no deadline")
        case _:
            assert_never(state)


def _repeat_report(state: Leaving, event: Event) -> Outcome:
    if isinstance(event, ManagerConnected) and state.report is not None:
        return Outcome(state, (SendToManager(state.report),), "the last report is repeated")
    return Outcome(state, because="this process is leaving")


def _hello(state: State, committed: Step) -> tuple[Command, ...]:
    """All messages that a restarted manager needs."""
    me = state.identity
    phase, more = "training", tuple[Command, ...]()
    match state:
        case Joining():
            phase = "joining"
        case Faulted(report=report):
            more = (SendToManager(report),)
        case Parked(at=at):
            phase, more = "parked" if at.whole else "joining", (_parked_message(state),)
        case Resumed():
            more = (_repaired_message(state),)
        case Training(proof=m.Committed() as proof):
            more = (SendToManager(proof),)
        case Training() | Parking() | Repairing() | Dumping() | Leaving():
            pass
        case _:
            assert_never(state)
    hello = m.WorkerHello(
        me.rank,
        me.node,
        me.incarnation,
        me.pid,
        state.incident,
        committed,
        phase,
        protected=True,
        shard=me.shard,
        replica=me.replica,
        without=me.without,
        own_since=me.own_since,
    )
    return (SendToManager(hello), *more)


def _parked_message(parked: Parked) -> SendToManager:
    me, at = parked.identity, parked.at
    return SendToManager(
        m.Parked(
            me.rank,
            me.incarnation,
            parked.incident,
            at.step,
            at.whole,
            at.undo,
            at.copies,
            at.earliest,
            at.turn,
            at.sections,
            at.outside,
        )
    )


def _parked_without_state(joining: Joining) -> SendToManager:
    me = joining.identity
    nothing = m.Parked(me.rank, me.incarnation, joining.incident, Step(0), whole=False)
    return SendToManager(replace(nothing, copies=joining.copies))


def _repaired_message(resumed: Resumed) -> SendToManager:
    me, done = resumed.identity, resumed.repair
    return SendToManager(
        m.Repaired(
            me.rank,
            me.incarnation,
            resumed.incident,
            done.step,
            done.groups_s,
            done.state_s,
        )
    )
