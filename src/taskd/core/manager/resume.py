"""The way back to training: repaired, resumed, restarted, dumped, or ended well.

Called by `core/manager` with what the ranks say; the plans are made in
`core/manager/strategy_actions.py`.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import growth, parking, rank_faults, strategy_actions
from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.states import (
    Deciding,
    Dumping,
    Ending,
    JobConfig,
    Outcome,
    Repairing,
    Resuming,
    State,
    Stopping,
    Training,
    mark_phase,
    then,
)
from taskd.core.rank_sets import NO_RANKS, RankSet
from taskd.model.clusterd import ResultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.messages import Committed, Dumped, Repaired, RepairFailed
from taskd.model.strategies import WireStrategy


def repaired(state: State, told: Repaired | Committed, now: float, config: JobConfig) -> Outcome:
    job = replace(state.job, best=max(state.job.best, told.step))
    done = RankSet((told.rank,)) if isinstance(told, Committed) else NO_RANKS
    match state:
        case Repairing():
            uncommitted = state.uncommitted - done
            unrepaired = state.unrepaired - {told.rank}
            if unrepaired:
                state = replace(state, job=job, unrepaired=unrepaired, uncommitted=uncommitted)
                return Outcome(state, because=f"{len(unrepaired)} ranks are not repaired yet")
            state_s = told.state_s if isinstance(told, Repaired) else 0.0
            before = job.open_incident.timestamps[-1][1] if job.open_incident else now
            job = mark_phase(mark_phase(job, "groups", max(before, now - state_s)), "state", now)
            deadline = now + config.resume_timeout_s
            resuming = Resuming(job, state.order, state.plan, uncommitted, deadline)
            return _committed(resuming, now, config)
        case Resuming():
            uncommitted = state.uncommitted - done
            return _committed(replace(state, job=job, uncommitted=uncommitted), now, config)
        case _:
            return Outcome(replace(state, job=job))


def _committed(state: Resuming, now: float, config: JobConfig) -> Outcome:
    if state.uncommitted:
        return Outcome(state, because=f"{len(state.uncommitted)} ranks have not stepped yet")
    return strategy_actions.recovered(mark_phase(state.job, "step", now), state.order, now, config)


def repair_failed(state: State, told: RepairFailed, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Training):
        # We were restarted, and took it for repaired.
        found = Fault.of(told.rank, FaultCause.COMMUNICATION, told.because, now)
        return rank_faults.handle_faults(state, (found,), now, config)
    if not isinstance(state, Repairing | Resuming):
        return Outcome(state, because="nothing is being repaired now")
    setback = f"rank {told.rank} could not be repaired: {told.because}"
    waiting = Repairing(
        state.job,
        state.order,
        state.plan,
        RankSet((told.rank,)) | (state.unrepaired if isinstance(state, Repairing) else NO_RANKS),
        state.uncommitted,
        min(state.deadline, now + config.setback_s),
        setback,
    )
    return Outcome(waiting, because=setback)


def dumped(state: State, told: Dumped, now: float, config: JobConfig) -> Outcome:
    if not isinstance(state, Dumping):
        return Outcome(state, because="nothing is being written now")
    if told.because:
        why = f"rank {told.rank} could not write: {told.because}"
        return strategy_actions.strategy_failed(state.job, state.order, why, now, config)
    unwritten = state.unwritten - {told.rank}
    if unwritten:
        return Outcome(replace(state, unwritten=unwritten), because=f"{len(unwritten)} still write")
    because = f"step {told.step} is written"
    report = ResultReport(0, WireStrategy.DUMP, uuid=state.job.uuid, info=because)
    job = state.job
    if job.open_incident is not None:
        job = replace(job, open_incident=replace(job.open_incident, dumped_step=told.step))
    if state.order.type == "saveAndExit":
        return then(Outcome(state, (report,)), strategy_actions.end_after_dump(job, now, config))
    return Outcome(Deciding(job, now + config.decide_timeout_s), (report,), because)


def rank_finished(state: State, now: float, config: JobConfig) -> Outcome:
    """A rank has ended well. When the last one has, so has the job."""
    done = all(state.job.view.ranks[rank].process is ProcessState.DONE for rank in state.job.world)
    if done and not isinstance(state, Ending | Dumping):
        return strategy_actions.end(state.job, 0, "every rank has ended well", now, config)
    match state:
        case Training():
            return growth.offer_growth(
                state, now, config
            )  # where a rank has made room, another can start
        case Dumping():
            return _left_while_writing(state, now, config)
        case Resuming():
            left = state.uncommitted & state.job.running()
            return _committed(replace(state, uncommitted=left), now, config)
        case Stopping():
            return parking.await_parking(state, state.running & state.job.running(), now, config)
        case _:
            return Outcome(state)


def _left_while_writing(state: Dumping, now: float, config: JobConfig) -> Outcome:
    """Its word that it has written may still be under way; but nobody is left to wait for long."""
    if state.unwritten & state.job.running():
        return Outcome(state)
    return Outcome(replace(state, deadline=min(state.deadline, now + config.setback_s)))
