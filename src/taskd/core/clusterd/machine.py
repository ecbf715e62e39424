"""clusterd's machine of one job: from a fault to a job that trains again.

    fault -> stop -> settle -> offered strategies? -> order -> result -> trains, or next strategy

`step` is the only entry. It passes the event to the module that owns the state: `new_faults`,
`round_start` (from the stop to the question), `decision` and `repair_progress` (from the order to
the result), `round_end`, `hot_switch`, `operation_round`, `platform`.

Times are seconds of the wall clock, so that deadlines survive a restart of clusterd.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from taskd.core.clusterd import cluster_events, decision, hot_switch, new_faults
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.job_facts import Labelling
from taskd.core.clusterd.round import operation_round, repair_progress, round_end, round_start
from taskd.core.clusterd.round.expected_reports import as_answered, refusal, uuid_of
from taskd.core.clusterd.round.turn import Turn
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


LEGAL: dict[type[State], set[type[State]]] = {
    Idle: {PreExiting, PlatformChoosing, Stopping, Dumping, AwaitingBackup, Pausing},
    Shrunk: {Stopping, Growing},
    Ended: {Idle},
    PreExiting: {PlatformChoosing, Stopping, Dumping},
    PlatformChoosing: {PlatformChoosing, Stopping, Dumping, HandedOver},
    Stopping: {Ended, Stopping, Settling, PlatformConfirming, Negotiating, HandedOver, Killing},
    Settling: {Stopping, PlatformConfirming, Negotiating, HandedOver},
    PlatformConfirming: {Stopping, Negotiating, HandedOver},
    Negotiating: {
        Ended,
        Stopping,
        AwaitingPods,
        PlatformRanking,
        Converging,
        Retrying,
        Replacing,
        Shrinking,
        Dumping,
        Exiting,
        HandedOver,
    },
    AwaitingPods: {Stopping, Shrinking, Dumping, Exiting},
    PlatformRanking: {Stopping, Replacing, Dumping, HandedOver},
    Converging: {Stopping, Retrying},
    Retrying: {
        Idle,
        Ended,
        Stopping,
        Settling,
        PlatformConfirming,
        Negotiating,
        AwaitingPods,
        Shrinking,
        Dumping,
        Exiting,
        HandedOver,
    },
    Replacing: {
        Idle,
        Shrunk,
        Ended,
        Stopping,
        AwaitingPods,
        Shrinking,
        Dumping,
        Exiting,
        HandedOver,
    },
    Shrinking: {Shrunk, Ended, Stopping, Growing, Dumping, Exiting, HandedOver},
    Growing: {Idle, Stopping, Dumping, Exiting, HandedOver},
    Dumping: {Ended, Stopping, Exiting, HandedOver},
    Exiting: {HandedOver},
    HandedOver: {Idle, Killing},
    Killing: {Idle, HandedOver},
    AwaitingBackup: {Idle, PreExiting, PlatformChoosing, Stopping, Dumping, AwaitingPause},
    AwaitingPause: {Stopping, HandedOver, AwaitingRemoval},
    AwaitingRemoval: {Stopping, HandedOver, Migrating},
    Migrating: {Idle, Stopping, HandedOver},
    Pausing: {Stopping, SwitchingNic, StressTesting, Resuming},
    SwitchingNic: {Stopping, Resuming},
    StressTesting: {Stopping, Resuming},
    Resuming: {Idle, Ended, Stopping, Killing},
}
"""From which state to which a job may go; docs/recovery.md draws it.

The simulator fails when it walks an edge that is not listed here, and when it never walks one that
is. An edge from a state to itself is a new incident. Not listed: when the cluster deletes the job,
every state goes to `Ended`.
"""


def step(state: State, event: Event, now: float, config: RecoveryConfig) -> Outcome:
    """Decide. The same state, event and time give the same outcome."""
    return _number_commands(_plan_recheck(state, _handle(state, event, now, config), now), now)


def _handle(state: State, event: Event, now: float, config: RecoveryConfig) -> Outcome:
    match event:
        case FaultReport(faults):
            return new_faults.faults_reported(state, faults, now, config)
        case StopReport() | StrategiesReport() | ResultReport():
            return refusal(state, event) or _report(state, event, now, config)
        case Tick():
            if now < state.deadline:
                return Outcome(state, because="the deadline has not passed")
            return _expire(state, now, config)
        case FaultsSeen(seen):
            handled = state.job.handled & {(fault.rank, fault.code) for fault in seen}
            if (seen, handled) != (state.job.seen, state.job.handled):
                state = replace(state, job=replace(state.job, seen=seen, handled=handled))
            return new_faults.faults_seen(state, now, config)
        case PodsSeen():
            return cluster_events.pods_seen(state, event, now, config)
        case PlatformSeen():
            return cluster_events.platform_seen(state, event, now, config)
        case JobRegistered() | JobDeleted():
            return cluster_events.registration(state, event)
        case Subscribed() | Unsubscribed():
            return cluster_events.stream(state, event, now, config)
        case SignalDelivered() | SignalFailed():
            return cluster_events.delivery(state, event, now, config)
        case ClusterWriteDone() | ClusterWriteFailed():
            return cluster_events.written(state, event, now, config)
        case OperatorAskedNic() | OperatorAskedStress():
            if isinstance(state, Idle):
                return operation_round.ask(state, event, now, config)
            busy = f"the job is busy: {type(state).__name__}"
            return Outcome(state, because=busy, answer=RecoverCode.OMIsRunning)
        case NicResult() | StressResult():
            return _operation_result(state, event, now, config)
        case _:
            assert_never(event)


def _report(state: State, report: ExpectedReport, now: float, config: RecoveryConfig) -> Outcome:
    """Handle a report that `refusal` has accepted."""
    if isinstance(state, Idle | Ended):
        return Outcome(state, answer=RecoverCode.OrderMix)
    answered = (*state.job.answered, as_answered(report, uuid_of(state)))[-8:]
    state = replace(state, job=replace(state.job, answered=answered))
    turn = Turn(state.job, state.round, now, config)
    match state, report:
        case Stopping(), StopReport():
            return round_start.stop_completed(turn, report)
        case Pausing(), StopReport():
            return operation_round.paused(state, turn, report)
        case ((Negotiating() | Shrunk()), StrategiesReport()):
            return repair_progress.strategies_reported(state, turn, report)
        case AwaitingBackup(), StrategiesReport():
            return hot_switch.refused(state, turn)
        case AwaitingPause(), StrategiesReport():
            return hot_switch.strategies_reported(state, turn, report)
        case ((SwitchingNic() | StressTesting()), ResultReport()):
            return operation_round.fault_reported(state, turn, report)
        case Resuming(), ResultReport():
            return operation_round.resumed(state, turn, report)
        case Migrating(), ResultReport():
            return hot_switch.status_reported(state, turn, report)
        case (
            (Retrying() | Replacing() | Shrinking() | Growing() | Dumping()),
            ResultReport(),
        ):
            return repair_progress.status_reported(state, turn, report)
        case _:
            return Outcome(state, answer=RecoverCode.OrderMix)


def _operation_result(
    state: State, event: NicResult | StressResult, now: float, config: RecoveryConfig
) -> Outcome:
    match state, event:
        case SwitchingNic(), NicResult(ok):
            turn = Turn(state.job, state.round, now, config)
            return operation_round.nic_result(state, turn, ok)
        case StressTesting(), StressResult():
            turn = Turn(state.job, state.round, now, config)
            return operation_round.stress_result(state, turn, event)
        case _:
            because = f"{type(state).__name__} does not wait for {type(event).__name__}"
            return Outcome(state, because=because, answer=RecoverCode.OrderMix)


def _expire(state: State, now: float, config: RecoveryConfig) -> Outcome:
    """The deadline has passed. Every state with a deadline has a way out."""
    if isinstance(state, Idle):
        return new_faults.look_again(state, now, config)
    if isinstance(state, Ended | Shrunk):
        return Outcome(state)
    turn = Turn(state.job, state.round, now, config)
    match state:
        case PreExiting():
            turn = turn.with_reason(
                "the processes on the broken device had time to exit"
            ).with_new_uuid()
            return round_start.open_round(turn)
        case PlatformChoosing():
            turn = turn.with_reason("the platform did not name a strategy in time")
            return round_end.give_up(turn, RecoverCode.WaitPlatStrategyTimeout)
        case PlatformConfirming():
            turn = turn.with_reason("the platform did not confirm the faults in time")
            return round_end.give_up(turn, RecoverCode.WriteConfirmFaultOrWaitPlatResultFault)
        case PlatformRanking():
            return decision.unranked(
                turn.with_reason("the platform did not write a rank table in time")
            )
        case Settling():
            return round_start.settled(turn)
        case Converging():
            return decision.retry(turn.with_reason("the network had time to find new routes"))
        case AwaitingPods():
            return decision.shrink(turn.with_reason("the scheduler did not find new pods in time"))
        case Replacing() if now < state.report_by:
            return repair_progress.replacing_expired(state, turn)
        case Growing() if not state.job.config.cluster:
            return repair_progress.not_grown(turn, "the job did not grow back in time")
        case Exiting():
            turn = replace(turn.with_reason("the scheduler takes over"), cause=state.cause)
            return round_end.hand_over(turn, state.order, ResetOperation.RESTART_ALL)
        case HandedOver():
            turn = turn.with_reason("the scheduler did not restart the job in time")
            return round_end.kill(turn, RecoverCode.ScheduleTimeout)
        case Killing():
            # No client received the order, and the ranks may stay parked forever: try again.
            turn = replace(
                turn.with_reason("the client did not receive the order to end the job"),
                cause=state.cause,
            )
            return round_end.hand_over(turn, state.order, ResetOperation.CLEAR)
        case AwaitingBackup() | AwaitingPause() | AwaitingRemoval() | Migrating():
            return hot_switch.expired(state, turn)
        case Pausing():
            return operation_round.pause_expired(state, turn)
        case SwitchingNic():
            return operation_round.nic_failed(state, turn, "report switch nic timeout")
        case StressTesting():
            return operation_round.stress_expired(state, turn)
        case Resuming():
            return operation_round.resume_expired(state, turn)
        case _:
            name = type(state).__name__.lower()
            turn = turn.with_reason(f"the job did not answer in time while {name}")
            return round_end.give_up(turn, RecoverCode.WaitReportTimeout)


def _plan_recheck(before: State, outcome: Outcome, now: float) -> Outcome:
    """On entering Idle, check at once whether a fault is left that starts a round."""
    state = outcome.state
    if isinstance(state, Idle) and not isinstance(before, Idle) and state.again_at is None:
        return replace(outcome, state=replace(state, again_at=now))
    return outcome


def _number_commands(outcome: Outcome, now: float) -> Outcome:
    """Give each command its number in the job's sequence; a repeated command keeps its own."""
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
