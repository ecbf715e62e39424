"""How clusterd gets one job past a fault.

    fault -> stop -> settle -> what can you do? -> strategy -> result -> the job trains, or the next

`step` is the only way in. It hands the event to the part that owns the state: `faults`
and `begin` (news), `rounds` (stop to question), `decision` and `repair` (order to result),
`descent` (the ends), `hotswitch`, `operations`, `platform`. `edges.LEGAL` is the map
of all states; docs/recovery.md draws it.

Time is given in seconds of the wall clock, so that deadlines hold across a restart of clusterd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from taskd.core.clusterd import cluster_events as cluster
from taskd.core.clusterd import decision
from taskd.core.clusterd import hot_switch as hotswitch
from taskd.core.clusterd import new_faults as faults
from taskd.core.clusterd import operation_round as operations
from taskd.core.clusterd import repair_progress as repair
from taskd.core.clusterd import round_end as descent
from taskd.core.clusterd import stop_and_ask as rounds
from taskd.core.clusterd.expected_reports import as_answered, refusal
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Labelling
from taskd.core.clusterd.states import (
    NEW,
    Asking,
    AwaitingBackup,
    AwaitingPause,
    AwaitingPods,
    AwaitingRemoval,
    Converging,
    Dumping,
    Ended,
    Exiting,
    Growing,
    HandedOver,
    Idle,
    Killing,
    Migrating,
    Negotiating,
    Outcome,
    Pausing,
    PlatformChoosing,
    PlatformConfirming,
    PlatformRanking,
    PreExiting,
    Replacing,
    Resuming,
    Retrying,
    Settling,
    Shrinking,
    Shrunk,
    State,
    Stopping,
    StressTesting,
    SwitchingNic,
)
from taskd.core.clusterd.turn import Matter
from taskd.model.clusterd import (
    ClusterWriteDone,
    ClusterWriteFailed,
    Command,
    Event,
    ExpectedReport,
    FaultReport,
    FaultsSeen,
    JobDeleted,
    JobRegistered,
    LabelPodGroup,
    OperatorAskedNic,
    OperatorAskedStress,
    PlatformSeen,
    PodsSeen,
    ReplyOperator,
    ResetOperation,
    ResultReport,
    Signal,
    SignalDelivered,
    SignalFailed,
    StopReport,
    StrategiesReport,
    Subscribed,
    Unsubscribed,
)
from taskd.model.codes import RecoverCode
from taskd.model.operations import NicResult, StressResult
from taskd.model.types import Tick

__all__ = ["NEW", "Outcome", "RecoveryConfig", "State", "step"]


def step(state: State, event: Event, now: float, config: RecoveryConfig) -> Outcome:
    """Decide. Same state, same event, same time: same answer."""
    return _number(_look_around(state, _take(state, event, now, config), now), now)


def _take(state: State, event: Event, now: float, config: RecoveryConfig) -> Outcome:
    match event:
        case FaultReport(told):
            return faults.faults_reported(state, told, now, config)
        case StopReport() | StrategiesReport() | ResultReport():
            return refusal(state, event) or _report(state, event, now, config)
        case Tick():
            if now < state.deadline:
                return Outcome(state, because="it is not yet time")
            return _expire(state, now, config)
        case FaultsSeen(seen):
            handled = state.job.handled & {(fault.rank, fault.code) for fault in seen}
            if (seen, handled) != (state.job.seen, state.job.handled):
                state = replace(state, job=replace(state.job, seen=seen, handled=handled))
            return faults.faults_seen(state, now, config)
        case PodsSeen():
            return cluster.pods_seen(state, event, now, config)
        case PlatformSeen():
            return cluster.platform_seen(state, event, now, config)
        case JobRegistered() | JobDeleted():
            return cluster.registration(state, event)
        case Subscribed() | Unsubscribed():
            return cluster.stream(state, event, now, config)
        case SignalDelivered() | SignalFailed():
            return cluster.delivery(state, event, now, config)
        case ClusterWriteDone() | ClusterWriteFailed():
            return cluster.written(state, event, now, config)
        case OperatorAskedNic() | OperatorAskedStress():
            if isinstance(state, Idle):
                return operations.ask(state, event, now, config)
            busy = f"the job is busy: {type(state).__name__}"
            return Outcome(state, because=busy, answer=RecoverCode.OMIsRunning)
        case NicResult() | StressResult():
            return _operation_result(state, event, now, config)
        case _:
            assert_never(event)


def _report(state: State, report: ExpectedReport, now: float, config: RecoveryConfig) -> Outcome:
    """A report that is waited for, as `refusal` has found."""
    if isinstance(state, Idle | Ended):
        return Outcome(state, answer=RecoverCode.OrderMix)
    answered = (*state.job.answered, as_answered(report))[-8:]
    state = replace(state, job=replace(state.job, answered=answered))
    matter = Matter(state.job, state.round, now, config)
    match state, report:
        case Stopping(), StopReport():
            return rounds.stop_completed(matter, report)
        case Pausing(), StopReport():
            return operations.paused(state, matter, report)
        case ((Negotiating() | Shrunk()), StrategiesReport()):
            return repair.strategies_reported(state, matter, report)
        case AwaitingPause(), StrategiesReport():
            return hotswitch.strategies_reported(state, matter, report)
        case ((SwitchingNic() | StressTesting()), ResultReport()):
            return operations.fault_reported(state, matter, report)
        case Resuming(), ResultReport():
            return operations.resumed(state, matter, report)
        case Migrating(), ResultReport():
            return hotswitch.status_reported(state, matter, report)
        case (
            (Retrying() | Replacing() | Shrinking() | Growing() | Dumping()),
            ResultReport(),
        ):
            return repair.status_reported(state, matter, report)
        case _:
            return Outcome(state, answer=RecoverCode.OrderMix)


def _operation_result(
    state: State, event: NicResult | StressResult, now: float, config: RecoveryConfig
) -> Outcome:
    match state, event:
        case SwitchingNic(), NicResult(ok):
            matter = Matter(state.job, state.round, now, config)
            return operations.nic_result(state, matter, ok)
        case StressTesting(), StressResult():
            matter = Matter(state.job, state.round, now, config)
            return operations.stress_result(state, matter, event)
        case _:
            because = f"{type(state).__name__} does not wait for {type(event).__name__}"
            return Outcome(state, because=because, answer=RecoverCode.OrderMix)


def _expire(state: State, now: float, config: RecoveryConfig) -> Outcome:
    """The deadline has come. Every state that has one has a way out."""
    if isinstance(state, Idle):
        return faults.look_again(state, now, config)
    if isinstance(state, Ended | Shrunk):
        return Outcome(state)
    matter = Matter(state.job, state.round, now, config)
    match state:
        case PreExiting():
            matter = matter.since("the broken processes had time to leave").next_turn()
            return rounds.open_round(matter)
        case PlatformChoosing():
            matter = matter.since("the platform has named no strategy in time")
            return descent.give_up(matter, RecoverCode.WaitPlatStrategyTimeout)
        case PlatformConfirming():
            matter = matter.since("the platform has not confirmed the faults in time")
            return descent.give_up(matter, RecoverCode.WriteConfirmFaultOrWaitPlatResultFault)
        case PlatformRanking():
            return decision.unranked(matter.since("the platform has written no rank table in time"))
        case Settling():
            return rounds.settled(matter)
        case Converging():
            return decision.retry(matter.since("the network had time to find its routes"))
        case AwaitingPods():
            return decision.shrink(matter.since("the scheduler has found no new pods in time"))
        case Replacing() if now < state.report_by:
            return repair.replacing_expired(state, matter)
        case Growing() if not state.job.config.cluster:
            return repair.not_grown(matter, "the job has not grown in time")
        case Exiting():
            matter = replace(matter.since("the scheduler takes over"), cause=state.cause)
            return descent.hand_over(matter, state.order, ResetOperation.RESTART_ALL)
        case HandedOver():
            matter = matter.since("the scheduler has not restarted the job in time")
            return descent.kill(matter, RecoverCode.ScheduleTimeout)
        case Killing():
            # Nobody was there to hear it, and the ranks may stand still for ever: once more.
            matter = replace(matter.since("the client has not heard its end"), cause=state.cause)
            return descent.hand_over(matter, state.order, ResetOperation.CLEAR)
        case AwaitingBackup() | AwaitingPause() | AwaitingRemoval() | Migrating():
            return hotswitch.expired(state, matter)
        case Pausing():
            return operations.pause_expired(state, matter)
        case SwitchingNic():
            return operations.nic_failed(state, matter, "report switch nic timeout")
        case StressTesting():
            return operations.stress_expired(state, matter)
        case Resuming():
            return operations.resume_expired(state, matter)
        case _:
            name = type(state).__name__.lower()
            matter = matter.since(f"the job has not answered in time while {name}")
            return descent.give_up(matter, RecoverCode.WaitReportTimeout)


def _look_around(before: State, outcome: Outcome, now: float) -> Outcome:
    """Whoever comes to rest looks whether something is left that begins a round."""
    state = outcome.state
    if isinstance(state, Idle) and not isinstance(before, Idle) and state.again_at is None:
        return replace(outcome, state=replace(state, again_at=now))
    return outcome


def _number(outcome: Outcome, now: float) -> Outcome:
    """Give each command its place in the job's sequence; one said again keeps its own."""
    if not outcome.commands:
        return outcome
    sequence = outcome.state.job.sequence
    labelling = outcome.state.job.labelling
    commands: list[Command] = []
    state = outcome.state
    for command in outcome.commands:
        if isinstance(command, ReplyOperator) or command.sequence:
            commands.append(command)
            continue
        sequence += 1
        numbered = replace(command, sequence=sequence)
        commands.append(numbered)
        if isinstance(numbered, LabelPodGroup) and numbered.key == ON:
            labelling = Labelling(sequence, numbered.value, now)
        if isinstance(state, Asking) and isinstance(numbered, Signal) and state.order == command:
            state = replace(state, order=numbered)
    job = replace(state.job, sequence=sequence, labelling=labelling)
    return replace(outcome, state=replace(state, job=job), commands=tuple(commands))
