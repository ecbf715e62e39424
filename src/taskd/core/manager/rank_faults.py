"""How the manager reacts to a fault of a rank, and when it reports it to clusterd.

Called by `machine.py`. A fault that comes while the ranks are being stopped changes which ranks
the manager waits for. A later one leads back to Reported, and clusterd opens the next incident.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import strategy_actions
from taskd.core.manager.incident_record import add_faults
from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.repair import parking
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
from taskd.core.manager.watch import bad_nodes
from taskd.model.clusterd import FaultReport, ResultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, Rank
from taskd.model.manager import JobStalled, RankHung
from taskd.model.messages import WorkerFailed


def handle_faults(
    state: State, faults: tuple[Fault, ...], now: float, config: JobConfig
) -> Outcome:
    new = tuple(fault for fault in faults if fault.rank in state.job.world)
    if not new:
        return Outcome(state, because="these ranks do not take part any more")
    job = add_faults(state.job, new)
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
        case Deciding() if not job.protected() and _have_exited(new):
            # Scripts without TaskD fail one after the other. All ranks are restarted anyway.
            because = f"{because}; a consequence of the fault that is being handled"
            return Outcome(replace(state, job=job), because=because)
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


def _have_exited(faults: tuple[Fault, ...]) -> bool:
    return all(fault.cause is FaultCause.EXITED for fault in faults)


def _short(evidence: str) -> str:
    return evidence.strip().rsplit("\n", 1)[-1][:200]


def worker_failed(state: State, message: WorkerFailed, now: float, config: JobConfig) -> Outcome:
    if message.rank not in state.job.world:
        return Outcome(state, because=f"rank {message.rank} does not take part any more")
    failure = Fault.of(message.rank, message.kind, message.evidence, now)
    match state:
        case Gathering(rebuilding=True):
            return Outcome(replace(state, job=add_faults(state.job, (failure,))))
        case Gathering() | Training() if message.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,))
            why = f"a collective failed on rank {message.rank}: {_short(message.evidence)}"
            silent = job.running() - {message.rank}
            return Outcome(Suspecting(job, silent, now + config.suspicion_s), because=why)
        case Suspecting(silent=silent) if message.kind is FaultCause.COMMUNICATION:
            job = add_faults(state.job, (failure,))
            if silent := silent - {message.rank}:
                return Outcome(replace(state, job=job, silent=silent))
            reports = (FaultReport(job.known_faults()),)
            because = "a collective failed on all ranks, but all are alive: a connection has failed"
            return Outcome(Reported(job, now, now + config.report_timeout_s), reports, because)
        case Repairing() | Resuming() if message.incident < state.job.incident:
            return Outcome(state, because="this failure is older than the repair")
        case Gathering() | Training() | Suspecting() | Repairing() | Resuming():
            return _handle_failure(state, failure, now, config)
        case _ if message.kind is FaultCause.COMMUNICATION or message.rank in state.job.faults:
            return Outcome(state, because="a consequence of the fault that is being handled")
        case _:
            return _handle_failure(state, failure, now, config)


def _handle_failure(state: State, failure: Fault, now: float, config: JobConfig) -> Outcome:
    if failure.cause is not FaultCause.MISCOMPUTED:
        return handle_faults(state, (failure,), now, config)
    isolated = bad_nodes.isolate_device(state, failure, config)
    return then(isolated, handle_faults(isolated.state, (failure,), now, config))


def rank_hung(state: State, hung: RankHung, now: float, config: JobConfig) -> Outcome:
    if _has_failed(state, hung.rank, hung.incarnation, hung.stopped):
        return Outcome(state, because=f"rank {hung.rank} has failed already")
    if not hung.stopped and not _may_hang(state, hung.rank):
        return Outcome(state, because="the ranks are parked")
    fault = Fault.of(hung.rank, FaultCause.HUNG, hung.evidence, now)
    return handle_faults(state, (fault,), now, config)


def job_stalled(state: State, stall: JobStalled, now: float, config: JobConfig) -> Outcome:
    """All ranks wait for each other: repeat the step; after a repair, try the next strategy."""
    match state:
        case Repairing(order=order) | Resuming(order=order):
            why = f"no rank continued after the repair: {stall.evidence.splitlines()[0]}"
            job = replace(state.job, stalled=True)
            return strategy_actions.strategy_failed(job, order, why, now, config)
        case Training() | Suspecting():
            late = tuple(
                Fault.of(rank, FaultCause.HUNG, stall.evidence, now)
                for rank, incarnation in stall.behind
                if not _has_failed(state, rank, incarnation)
            )
            running = state.job.running() - state.job.broken()
            if not late and running:
                cause = FaultCause.COMMUNICATION
                late = (Fault.of(min(running), cause, stall.evidence, now),)
            return handle_faults(state, late, now, config)
        case Gathering():
            return Outcome(state, because="not all ranks are known yet")
        case _:
            return Outcome(state, because="the ranks are parked")


def _may_hang(state: State, rank: Rank) -> bool:
    match state:
        case Gathering() | Training() | Suspecting() | Resuming():
            return True
        case Repairing(plan=plan):
            # The other ranks are parked; a replacement runs its script up to its first step.
            return any(member.rank == rank for member in plan.replaced)
        case _:
            return False


def _has_failed(state: State, rank: Rank, incarnation: Incarnation, stopped: bool = False) -> bool:
    view = state.job.view.ranks.get(rank)
    if view is None or view.process is not ProcessState.ALIVE or view.incarnation != incarnation:
        return True
    if isinstance(state, Repairing | Resuming) or (stopped and isinstance(state, Restarting)):
        return False  # the known fault is that of its former incarnation
    return rank in state.job.broken()
