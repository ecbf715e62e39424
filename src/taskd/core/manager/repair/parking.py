"""Parking all ranks: which ranks must park, which have, and what happens then.

Called by `machine.py` (when a rank reports that it is parked) and `clusterd_signals.py` (when
clusterd orders a stop).
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from taskd.core.manager import script_errors, strategy_actions
from taskd.core.manager.incident_record import add_faults, mark_phase, start_incident
from taskd.core.manager.job_view import NO_STEP, ProcessState
from taskd.core.manager.states import (
    Deciding,
    Job,
    JobConfig,
    Outcome,
    Paused,
    State,
    Stopping,
    then,
    with_job,
)
from taskd.core.rank_sets import NO_RANKS, RankSet, RankTable
from taskd.model.clusterd import Signal, StopReport, StrategiesReport
from taskd.model.faults import Fault, FaultCause, FaultKind
from taskd.model.ids import EVERY_WORKER, Incident
from taskd.model.manager import Command, SendMessage
from taskd.model.messages import Park, Parked
from taskd.model.strategies import WireStrategy

CANNOT = 499
"""The code for "this cannot be done", see model/codes.py."""


def begin_stop(
    state: State, signal: Signal, incident: Incident, now: float, config: JobConfig
) -> Outcome:
    if "pause_train" in signal.actions and not state.job.protected():
        report = StopReport(CANNOT, signal.uuid, "these ranks cannot be paused")
        return Outcome(state, (report,), "these ranks do not use taskd, so they cannot be paused")
    known = _known_parked(state.job) if incident == state.job.incident else RankTable[Parked]()
    job = replace(start_incident(state.job, incident, signal.uuid, now), parked=known)
    running = job.running() - job.broken() - RankSet(known)
    if not job.protected():
        # These ranks cannot reply. They are killed once clusterd has decided.
        return all_parked(Stopping(job, NO_RANKS, signal, now), now, config)
    ranks = ", ".join(str(fault.rank) for fault in job.known_faults()) or "none"
    because = f"incident {incident}: failed ranks: {ranks}"
    limit = now + config.stop_timeout_s
    stopping = Stopping(job, running, signal, limit, limit)
    outcome = Outcome(stopping, (SendMessage(EVERY_WORKER, Park(incident, because)),), because)
    return then(outcome, await_parking(stopping, running, now, config))


def _known_parked(job: Job) -> RankTable[Parked]:
    """The ranks known to be parked in this incident. A joining rank has no step to abandon."""
    joining = {
        rank: Parked(rank, view.incarnation, job.incident, NO_STEP, whole=False)
        for rank, view in job.view.ranks.items()
        if view.process is ProcessState.ALIVE
        and view.phase == "joining"
        and view.incident == job.incident
    }
    parked = {rank: parked for rank, parked in job.parked.items() if job.is_parked(rank)}
    return RankTable(joining).update(parked)


def rank_parked(state: State, message: Parked, now: float, config: JobConfig) -> Outcome:
    state = with_job(state, parked=state.job.parked.put(message.rank, message))
    if not isinstance(state, Stopping):
        return Outcome(state, because=f"rank {message.rank} is parked")
    return await_parking(state, state.running - {message.rank}, now, config)


def await_parking(state: Stopping, running: RankSet, now: float, config: JobConfig) -> Outcome:
    state = replace(state, running=running)
    if not running:
        return all_parked(state, now, config)
    deadline = min(state.limit, _patience(state.job, running, config))
    because = f"{len(running)} ranks are still running"
    return Outcome(replace(state, deadline=deadline), because=because)


def _patience(job: Job, running: RankSet, config: JobConfig) -> float:
    """How long to wait: if only ranks of disconnected nodes are left, those nodes probably died."""
    since = 0.0
    for rank in running if job.disconnected else NO_RANKS:
        if (at := job.disconnected.get(job.view.ranks[rank].node)) is None:
            return inf
        since = max(since, at)
    return since + config.unlinked_s if job.disconnected else inf


def all_parked(state: Stopping, now: float, config: JobConfig) -> Outcome:
    """All living ranks are parked: report it, or carry out the order that required it."""
    job, order = mark_phase(state.job, "stopped", now), state.order
    report = StopReport(0, order.uuid, faults=job.known_faults())
    if order.type == "stopTrain" and "pause_train" in order.actions:
        limit = order.timeout_s or config.pause_timeout_s
        because = "all ranks are parked; training is paused"
        return Outcome(Paused(job, now + limit), (report,), because)
    job = _count_progress(job, now)
    if order.type == "stopTrain":
        deciding = Deciding(job, now + config.decide_timeout_s)
        return Outcome(deciding, (report,), "all ranks are parked")
    return proceed(job, order, now, config)


def proceed(job: Job, order: Signal, now: float, config: JobConfig) -> Outcome:
    """All ranks are parked: answer which strategies are possible, or carry out the decision."""
    exits: tuple[Command, ...] = ()
    if "fault_nodes_exit" in order.actions:
        job, exits = strategy_actions.dismiss_nodes(job, order, config)
    if order.type != "globalFault":
        job = _give_up_retrying(job, order)
        return then(
            Outcome(Deciding(job, now), exits), strategy_actions.carry_out(job, order, now, config)
        )
    job = _add_named_ranks(job, order, now)
    possible = strategy_actions.feasible(job, config)
    report = StrategiesReport(possible, order.uuid, job.known_faults())
    state = Deciding(job, now + config.decide_timeout_s)
    return Outcome(state, (*exits, report), f"possible strategies: {', '.join(possible)}")


def _add_named_ranks(job: Job, order: Signal, now: float) -> Job:
    """clusterd can begin a round by itself: an operator or a stress test has named these ranks."""
    if job.faults:
        return job
    evidence = "named by clusterd: a stress test, a broken device or an operator"
    found = tuple(
        Fault.of(fault.rank, FaultCause.NAMED, evidence, now)
        for fault in order.faults
        if fault.rank in job.running() and fault.kind is FaultKind.ORDINARY
    )
    return add_faults(job, found) if found else job


def _give_up_retrying(job: Job, order: Signal) -> Job:
    """No rank is lost, but retries have not helped: the ranks that clusterd names count as lost.

    Otherwise the next strategy would only repeat what has failed.
    """
    before = job.past_incidents[-1] if job.past_incidents else None
    retried = before is not None and (before.strategy, before.outcome) == (
        WireStrategy.RETRY,
        "superseded",
    )
    if (
        not retried
        or order.strategy not in (WireStrategy.RECOVER, WireStrategy.DOWNGRADE)
        or job.broken()
    ):
        return job
    named = {fault.rank for fault in order.faults if fault.kind is FaultKind.ORDINARY}
    faults = {
        rank: Fault.of(rank, FaultCause.UNREPAIRED, fault.evidence, fault.seen_at)
        if rank in named
        else fault
        for rank, fault in job.faults.items()
    }
    return replace(job, faults=faults)


def _count_progress(job: Job, now: float) -> Job:
    """Of the parked ranks and of the dead ones: perhaps all have died of the same error."""
    dead = (job.view.ranks[rank].step for rank in job.faults)
    best = max((*(parked.step for parked in job.parked.values()), *dead), default=job.best)
    has_progress = best > job.best or now >= job.settled_at
    job = script_errors.judge(job, has_progress)
    if has_progress:
        return replace(job, best=max(best, job.best), fruitless=0)
    return replace(job, fruitless=job.fruitless + 1)
