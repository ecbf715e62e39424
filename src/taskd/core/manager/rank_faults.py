"""How the manager reacts to a fault of a rank, and when it reports it to clusterd.

Called by `machine.py`. A fault that comes while the ranks are being stopped changes which ranks
the manager waits for. A later one leads back to Reported, and clusterd opens the next incident.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import parking, strategy_actions
from taskd.core.manager.incident_record import add_faults
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
    Restarting,
    Resuming,
    State,
    Stopping,
    Suspecting,
    Training,
    then,
)
from taskd.model.clusterd import FaultReport, ResultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.manager import RankHung
from taskd.model.messages import WorkerFailed


def handle_faults(
    state: State, faults: tuple[Fault, ...], now: float, config: JobConfig
) -> Outcome:
    new = tuple(fault for fault in faults if fault.rank in state.job.world)
    if not new:
        return Outcome(state, because="these ranks do not take part any more")
    job = add_faults(state.job, new, now)
    report = FaultReport(job.known_faults())
    because = "; ".join(
        f"rank {fault.rank} {fault.cause}: {_short(fault.evidence)}" for fault in new
    )
    match state:
        case Ending() | Ended():
            return Outcome(state)
        case Gathering(rebuilding=True):
            return Outcome(
                replace(state, job=job), because=f"{because}; waiting for the other ranks"
            )
        case Stopping():
            parked = parking.await_parking(
                replace(state, job=job), state.running - job.broken(), now, config
            )
            return then(Outcome(state, (report,), because), parked)
        case Deciding() | Awaiting():
            return Outcome(replace(state, job=job), (report,), because)
        case Repairing(order=order) | Resuming(order=order) if job.ascend:
            # Ascend's clusterd accepts a new fault only after the end of the strategy.
            result = ResultReport(
                strategy_actions.FAILED, order.strategy, uuid=job.uuid, info=because
            )
            reported = Reported(job, now, now + config.report_timeout_s)
            return Outcome(reported, (result, report), because)
        case Reported(since=since):
            return Outcome(Reported(job, since, now + config.report_timeout_s), (report,), because)
        case _:
            return Outcome(Reported(job, now, now + config.report_timeout_s), (report,), because)


def _short(evidence: str) -> str:
    return evidence.strip().rsplit("\n", 1)[-1][:200]


def worker_failed(state: State, message: WorkerFailed, now: float, config: JobConfig) -> Outcome:
    failure = Fault.of(message.rank, message.kind, message.evidence, now)
    match state:
        case Gathering(rebuilding=True):
            return Outcome(replace(state, job=add_faults(state.job, (failure,), now)))
        case Gathering() | Training() if message.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,), now)
            why = f"a collective failed on rank {message.rank}: {_short(message.evidence)}"
            silent = job.running() - {message.rank}
            return Outcome(Suspecting(job, silent, now + config.suspicion_s), because=why)
        case Suspecting(silent=silent) if message.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,), now)
            if silent := silent - {message.rank}:
                return Outcome(replace(state, job=job, silent=silent))
            reports = (FaultReport(job.known_faults()),)
            because = "a collective failed on all ranks, but all are alive: a connection has failed"
            return Outcome(Reported(job, now, now + config.report_timeout_s), reports, because)
        case Repairing() | Resuming() if message.incident < state.job.incident:
            return Outcome(state, because="this failure is older than the repair")
        case Gathering() | Training() | Suspecting() | Repairing() | Resuming():
            return handle_faults(state, (failure,), now, config)
        case _ if message.kind is FaultCause.COMMUNICATION or message.rank in state.job.faults:
            return Outcome(state, because="a consequence of the fault that is being handled")
        case _:
            return handle_faults(state, (failure,), now, config)


def rank_hung(state: State, hung: RankHung, now: float, config: JobConfig) -> Outcome:
    if _has_failed(state, hung):
        return Outcome(state, because=f"rank {hung.rank} has failed already")
    if not hung.stopped and not isinstance(state, Gathering | Training | Suspecting | Resuming):
        return Outcome(state, because="the ranks are parked")
    fault = Fault.of(hung.rank, FaultCause.HUNG, hung.evidence, now)
    return handle_faults(state, (fault,), now, config)


def _has_failed(state: State, hung: RankHung) -> bool:
    view = state.job.view.ranks.get(hung.rank)
    if (
        view is None
        or view.process is not ProcessState.ALIVE
        or view.incarnation != hung.incarnation
    ):
        return True
    if hung.stopped and isinstance(state, Repairing | Resuming | Restarting):
        return False  # the known fault is that of its former incarnation
    return hung.rank in state.job.broken()
