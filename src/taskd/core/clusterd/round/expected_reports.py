"""Decides whether a report is expected now, by state, uuid and strategy.

A report that was accepted before is a duplicate and answered with 0. A report of a round that is
over gets the code that ended the round. Every other report is out of order.

Ascend's clients send no uuid. Their report is a duplicate only of a report that answered the same
order: offered again after a failed retry, the same strategies are an answer to a new question.
"""

from __future__ import annotations

from taskd.core.clusterd.job_facts import Answered, Attempt
from taskd.core.clusterd.states import (
    AwaitingBackup,
    AwaitingPause,
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
    Replacing,
    Resuming,
    Retrying,
    Shrinking,
    Shrunk,
    State,
    Stopping,
    StressTesting,
    SwitchingNic,
)
from taskd.model.clusterd import ExpectedReport, ResultReport, StopReport, StrategiesReport
from taskd.model.codes import RecoverCode
from taskd.model.strategies import Strategy, WireStrategy


def refusal(state: State, report: ExpectedReport) -> Outcome | None:
    """Why the report is not accepted; None if it is."""
    job, current = state.job, uuid_of(state)
    if _repeats(state, report):
        return Outcome(state, because="this report was accepted before")
    if _unscheduled(state, report):
        because = "the scheduler did not replace the lost pods in time"
        return Outcome(state, because=because, answer=RecoverCode.ScheduleTimeout)
    if report.uuid and report.uuid in job.past:
        return Outcome(state, because="its round is over", answer=RecoverCode.ControllerEventCancel)
    if report.uuid and report.uuid != current:
        because = f"no round has the uuid {report.uuid}"
        return Outcome(state, because=because, answer=RecoverCode.OrderMix)
    if isinstance(state, Exiting | HandedOver | Killing | Ended):
        answer = state.cause if state.cause is not RecoverCode.OK else RecoverCode.OrderMix
        return Outcome(state, because="the whole job is already being stopped", answer=answer)
    if not _awaited(state, report):
        name = type(state).__name__
        because = f"{name} does not expect {_describe(report)}"
        return Outcome(state, because=because, answer=RecoverCode.OrderMix)
    return None


def _unscheduled(state: State, report: ExpectedReport) -> bool:
    """The result of a replacement that was just given up because its pods did not come."""
    if isinstance(state, Idle | Ended) or not isinstance(report, ResultReport):
        return False
    past, history = state.job.past, state.round.history
    return (
        report.strategy == WireStrategy.RECOVER
        and bool(history)
        and history[-1] == Attempt(Strategy.RECOVER, RecoverCode.ScheduleTimeout)
        and report.uuid in ("", past[-1])
        and not _awaited(state, report)
    )


def _repeats(state: State, report: ExpectedReport) -> bool:
    orders = {
        answered.order
        for answered in state.job.answered
        if answered == as_answered(report, answered.order)
    }
    if report.uuid or not _awaited(state, report):
        return bool(orders)
    return uuid_of(state) in orders


def uuid_of(state: State) -> str:
    return "" if isinstance(state, Idle | Ended) else state.round.uuid


def as_answered(report: ExpectedReport, order: str) -> Answered:
    name = type(report).__name__
    match report:
        case StopReport():
            return Answered(name, report.uuid, report.code, "", order)
        case StrategiesReport():
            return Answered(name, report.uuid, 0, ",".join(report.strategies), order)
        case ResultReport():
            isolated = ",".join(map(str, report.isolated))
            strategy = f"{report.strategy}:{isolated}"
            return Answered(name, report.uuid, report.code, strategy, order)


def _awaited(state: State, report: ExpectedReport) -> bool:
    match state, report:
        case ((Stopping() | Pausing()), StopReport()):
            return True
        case ((Negotiating() | AwaitingPause() | Shrunk()), StrategiesReport()):
            return True
        case AwaitingBackup(), StrategiesReport(strategies=offered):
            return set(offered) <= {WireStrategy.EXIT}
        case ((SwitchingNic() | StressTesting()), ResultReport()):
            return report.code != RecoverCode.OK
        case _, ResultReport(strategy=strategy):
            return strategy == _ordered(state)
        case _:
            return False


def _ordered(state: State) -> WireStrategy | None:
    """What the job was ordered to do, in the word that its report must use."""
    match state:
        case Retrying():
            return WireStrategy.RETRY
        case Replacing():
            return WireStrategy.RECOVER
        case Shrinking():
            return WireStrategy.DOWNGRADE
        case Growing():
            return WireStrategy.UPGRADE
        case Dumping():
            return WireStrategy.DUMP
        case Migrating():
            return WireStrategy.MIGRATION
        case Resuming():
            return WireStrategy.CONTINUE
        case _:
            return None


def _describe(report: ExpectedReport) -> str:
    match report:
        case ResultReport():
            return f"the result of {report.strategy or 'an unnamed strategy'}"
        case StopReport():
            return "a completed stop"
        case StrategiesReport():
            return "strategies"
