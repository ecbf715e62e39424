"""Is this report the one that is waited for? Checked by state, uuid and strategy, in one place.

A report that was taken before is a duplicate and answered 0. One of a round that is over is told
so, with what ended that round; anything else is out of order.
"""

from __future__ import annotations

from taskd.core.clusterd.job_facts import Answered, Attempt
from taskd.core.clusterd.states import (
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
from taskd.model.clusterd import Report, StatusReported, StopCompleted, StrategiesReported
from taskd.model.codes import RecoverCode
from taskd.model.strategies import CONTINUE, MIGRATION, UPGRADE, Strategy


def refusal(state: State, report: Report) -> Outcome | None:
    """None: take it."""
    job = state.job
    if as_answered(report) in job.answered:
        return Outcome(state, because="this report was taken before")
    current = "" if isinstance(state, Idle | Ended) else state.round.uuid
    if _unscheduled(state, report):
        because = "the scheduler has not replaced the lost pods in time"
        return Outcome(state, because=because, answer=RecoverCode.ScheduleTimeout)
    if report.uuid and report.uuid in job.past:
        return Outcome(state, because="its round is over", answer=RecoverCode.ControllerEventCancel)
    if report.uuid and report.uuid != current:
        because = f"no round has the uuid {report.uuid}"
        return Outcome(state, because=because, answer=RecoverCode.OrderMix)
    if isinstance(state, Exiting | HandedOver | Killing | Ended):
        answer = state.cause if state.cause is not RecoverCode.OK else RecoverCode.OrderMix
        return Outcome(state, because="the job is already being stopped", answer=answer)
    if not _awaited(state, report):
        name = type(state).__name__
        because = f"{name} does not wait for {_describe(report)}"
        return Outcome(state, because=because, answer=RecoverCode.OrderMix)
    return None


def _unscheduled(state: State, report: Report) -> bool:
    """The result of a replacement that was given up last, because its pods did not come."""
    if isinstance(state, Idle | Ended) or not isinstance(report, StatusReported):
        return False
    past, history = state.job.past, state.round.history
    return (
        report.strategy == Strategy.RECOVER.order
        and bool(history)
        and history[-1] == Attempt(Strategy.RECOVER, RecoverCode.ScheduleTimeout)
        and report.uuid in ("", past[-1])
        and not _awaited(state, report)
    )


def as_answered(report: Report) -> Answered:
    name = type(report).__name__
    match report:
        case StopCompleted():
            return Answered(name, report.uuid, report.code, "")
        case StrategiesReported():
            return Answered(name, report.uuid, 0, ",".join(report.strategies))
        case StatusReported():
            isolated = ",".join(map(str, report.isolate))
            return Answered(name, report.uuid, report.code, f"{report.strategy}:{isolated}")


def _awaited(state: State, report: Report) -> bool:
    match state, report:
        case ((Stopping() | Pausing()), StopCompleted()):
            return True
        case ((Negotiating() | AwaitingPause() | Shrunk()), StrategiesReported()):
            return True
        case ((SwitchingNic() | StressTesting()), StatusReported()):
            return report.code != RecoverCode.OK
        case _, StatusReported(strategy=strategy):
            return strategy != "" and strategy == _ordered(state)
        case _:
            return False


def _ordered(state: State) -> str:
    """What the job was told to do, in the word it must report under."""
    match state:
        case Retrying():
            return "retry"
        case Replacing():
            return "recover"
        case Shrinking():
            return "downgrade"
        case Growing():
            return UPGRADE
        case Dumping():
            return "dump"
        case Migrating():
            return MIGRATION
        case Resuming():
            return CONTINUE
        case _:
            return ""


def _describe(report: Report) -> str:
    match report:
        case StatusReported():
            return f"the result of {report.strategy or 'nothing in particular'}"
        case StopCompleted():
            return "a completed stop"
        case StrategiesReported():
            return "strategies"
