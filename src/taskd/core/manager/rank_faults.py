"""What happens when something is wrong with a rank: who is told, and whether it is news.

Called by `core/manager`. A fault that comes while the ranks are being stopped changes who is waited
for; one that comes later takes the machine back to Reported, and clusterd opens the next incident.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import parking, strategy_actions
from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.states import (
    Awaiting,
    Deciding,
    Ended,
    Ending,
    Gathering,
    JobConfig,
    Outcome,
    Repairing,
    Reported,
    Resuming,
    State,
    Stopping,
    Suspecting,
    Training,
    add_faults,
    then,
)
from taskd.model.clusterd import FaultReport, ResultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Rank
from taskd.model.messages import WorkerFailed


def handle_faults(
    state: State, faults: tuple[Fault, ...], now: float, config: JobConfig
) -> Outcome:
    new = tuple(fault for fault in faults if fault.rank in state.job.world)
    if not new:
        return Outcome(state, because="these ranks are not in the world any more")
    job = add_faults(state.job, new, now)
    told = FaultReport(job.known_faults())
    because = "; ".join(
        f"rank {fault.rank} {fault.cause}: {_short(fault.evidence)}" for fault in new
    )
    match state:
        case Ending() | Ended():
            return Outcome(state)
        case Gathering(rebuilding=True):
            return Outcome(
                replace(state, job=job), because=f"{because}; others are yet to be heard"
            )
        case Stopping():
            standing = parking.await_parking(
                replace(state, job=job), state.running - job.broken(), now, config
            )
            return then(Outcome(state, (told,), because), standing)
        case Deciding() | Awaiting():
            return Outcome(replace(state, job=job), (told,), because)
        case Repairing(order=order) | Resuming(order=order) if job.ascend:
            # Ascend's clusterd waits for the end of the strategy and takes no new fault before.
            report = ResultReport(
                strategy_actions.FAILED, order.strategy, uuid=job.uuid, info=because
            )
            reported = Reported(job, now, now + config.report_timeout_s)
            return Outcome(reported, (report, told), because)
        case Reported(since=since):
            return Outcome(Reported(job, since, now + config.report_timeout_s), (told,), because)
        case _:
            return Outcome(Reported(job, now, now + config.report_timeout_s), (told,), because)


def _short(evidence: str) -> str:
    return evidence.strip().rsplit("\n", 1)[-1][:200]


def worker_failed(state: State, told: WorkerFailed, now: float, config: JobConfig) -> Outcome:
    failure = Fault.of(told.rank, told.kind, told.evidence, now)
    match state:
        case Gathering(rebuilding=True):
            return Outcome(replace(state, job=add_faults(state.job, (failure,), now)))
        case Gathering() | Training() if told.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,), now)
            why = f"rank {told.rank} lost a collective: {_short(told.evidence)}"
            silent = job.running() - {told.rank}
            return Outcome(Suspecting(job, silent, now + config.suspicion_s), because=why)
        case Suspecting(silent=silent) if told.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,), now)
            if silent := silent - {told.rank}:
                return Outcome(replace(state, job=job, silent=silent))
            reports = (FaultReport(job.known_faults()),)
            because = "every rank is there to say that it lost a collective: a link has failed"
            return Outcome(Reported(job, now, now + config.report_timeout_s), reports, because)
        case Repairing() | Resuming() if told.incident < state.job.incident:
            return Outcome(state, because="it failed before it was repaired")
        case Gathering() | Training() | Suspecting() | Repairing() | Resuming():
            return handle_faults(state, (failure,), now, config)
        case _ if told.kind is FaultCause.COMMUNICATION or told.rank in state.job.faults:
            return Outcome(state, because="an echo of the fault that is being dealt with")
        case _:
            return handle_faults(state, (failure,), now, config)


def rank_hung(state: State, rank: Rank, evidence: str, now: float, config: JobConfig) -> Outcome:
    view = state.job.view.ranks.get(rank)
    if view is None or view.process is not ProcessState.ALIVE or rank in state.job.broken():
        return Outcome(state, because=f"rank {rank} is known to have failed")
    match state:
        case Gathering() | Training() | Suspecting() | Resuming():
            return handle_faults(
                state, (Fault.of(rank, FaultCause.HUNG, evidence, now),), now, config
            )
        case _:
            return Outcome(state, because="ranks stand still now, by order")
