"""How a strategy finishes: ranks are repaired, commit a step, write a checkpoint, or finish.

Called by `machine.py` with the ranks' messages. `strategy_actions.py` starts the strategies.
"""

from __future__ import annotations

from dataclasses import replace

from taskd.core.manager import rank_faults, strategy_actions
from taskd.core.manager.incident_record import mark_phase
from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.repair import growth, parking
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
    then,
)
from taskd.core.rank_sets import NO_RANKS, RankSet
from taskd.model.clusterd import ResultReport
from taskd.model.faults import Fault, FaultCause
from taskd.model.messages import Committed, Dumped, Repaired, RepairFailed
from taskd.model.strategies import WireStrategy


def repaired(state: State, message: Repaired | Committed, now: float, config: JobConfig) -> Outcome:
    job = replace(state.job, best=max(state.job.best, message.step))
    done = RankSet((message.rank,)) if isinstance(message, Committed) else NO_RANKS
    match state:
        case Repairing():
            uncommitted = state.uncommitted - done
            unrepaired = state.unrepaired - {message.rank}
            if unrepaired:
                state = replace(state, job=job, unrepaired=unrepaired, uncommitted=uncommitted)
                return Outcome(state, because=f"{len(unrepaired)} ranks still to be repaired")
            state_s = message.state_s if isinstance(message, Repaired) else 0.0
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
        return Outcome(
            state, because=f"{len(state.uncommitted)} ranks have not committed a step yet"
        )
    return strategy_actions.recovered(mark_phase(state.job, "step", now), state.order, now, config)


def repair_failed(state: State, message: RepairFailed, now: float, config: JobConfig) -> Outcome:
    if isinstance(state, Training):
        # The manager was restarted and believed that the rank was repaired.
        found = Fault.of(message.rank, FaultCause.COMMUNICATION, message.because, now)
        return rank_faults.handle_faults(state, (found,), now, config)
    if not isinstance(state, Repairing | Resuming):
        return Outcome(state, because="no repair is in progress")
    setback = f"rank {message.rank} could not be repaired: {message.because}"
    waiting = Repairing(
        state.job,
        state.order,
        state.plan,
        RankSet((message.rank,)) | (state.unrepaired if isinstance(state, Repairing) else NO_RANKS),
        state.uncommitted,
        min(state.deadline, now + config.setback_s),
        setback,
    )
    return Outcome(waiting, because=setback)


def dumped(state: State, message: Dumped, now: float, config: JobConfig) -> Outcome:
    if not isinstance(state, Dumping):
        return Outcome(state, because="no checkpoint is being written")
    if message.because:
        why = f"rank {message.rank} could not write its checkpoint: {message.because}"
        return strategy_actions.strategy_failed(state.job, state.order, why, now, config)
    unwritten = state.unwritten - {message.rank}
    if unwritten:
        return Outcome(
            replace(state, unwritten=unwritten), because=f"{len(unwritten)} ranks are still writing"
        )
    because = f"step {message.step} is written"
    report = ResultReport(0, WireStrategy.DUMP, uuid=state.job.uuid, info=because)
    job = state.job
    if job.open_incident is not None:
        job = replace(job, open_incident=replace(job.open_incident, dumped_step=message.step))
    if state.order.type == "saveAndExit":
        return then(Outcome(state, (report,)), strategy_actions.end_after_dump(job, now, config))
    return Outcome(Deciding(job, now + config.decide_timeout_s), (report,), because)


def rank_finished(state: State, now: float, config: JobConfig) -> Outcome:
    """A rank has exited with code 0. After the last one the job ends."""
    done = all(state.job.view.ranks[rank].process is ProcessState.DONE for rank in state.job.world)
    if done and not isinstance(state, Ending | Dumping):
        return strategy_actions.end(state.job, 0, "all ranks have finished", now, config)
    match state:
        case Training():
            # A finished rank may leave room for one that is missing.
            return growth.offer_growth(state, now, config)
        case Dumping():
            return _finished_while_dumping(state, now, config)
        case Resuming():
            left = state.uncommitted & state.job.running()
            return _committed(replace(state, uncommitted=left), now, config)
        case Stopping():
            return parking.await_parking(state, state.running & state.job.running(), now, config)
        case _:
            return Outcome(state)


def _finished_while_dumping(state: Dumping, now: float, config: JobConfig) -> Outcome:
    """Its Dumped message may still be in flight; if all writers have exited, wait only briefly."""
    if state.unwritten & state.job.running():
        return Outcome(state)
    return Outcome(replace(state, deadline=min(state.deadline, now + config.setback_s)))
