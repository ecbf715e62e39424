"""Growing back: when a job that has shrunk says that it could, and when it had better wait.

A node that comes back may be as broken as before. Each time that the job has to shrink soon after
it has grown, it waits twice as long before it tries again. `core/manager/strategy_actions.py`
does the work.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.rank_placement import missing_ranks, place
from taskd.core.manager.states import Job, JobConfig, Outcome, Training, with_job
from taskd.model.clusterd import StrategiesReport
from taskd.model.strategies import WireStrategy

MOST_DOUBLINGS = 6


def training_state(job: Job, now: float, config: JobConfig) -> Training:
    """The job trains; if it is to grow later, it looks again then."""
    due = _due(job, config)
    return Training(job, due if now < due and missing_ranks(job) else inf)


def offer_growth(state: Training, now: float, config: JobConfig) -> Outcome:
    """A job that has shrunk says so when every rank could have a place again, and at once."""
    job = state.job
    seats = place(job, missing_ranks(job), in_place=False)
    if job.ascend or not seats or now < _due(job, config):
        return Outcome(state)
    if any(job.view.ranks[rank].process is ProcessState.DONE for rank in job.world):
        return Outcome(state, because="it is about to end")
    if not all(job.view.nodes[seat.node].warm for seat in seats):
        return Outcome(state)
    told = (StrategiesReport((WireStrategy.UPGRADE,), job.uuid),)
    return Outcome(with_job(state, offered=True), told, f"{len(seats)} ranks could come back")


def note_growth(job: Job, now: float) -> Job:
    return replace(job, growths=job.growths + 1, grown_at=now, offered=False)


def note_shrink(job: Job, now: float, config: JobConfig) -> Job:
    settled = now >= job.grown_at + config.settled_s
    return replace(job, growths=0) if settled else job


def _due(job: Job, config: JobConfig) -> float:
    if not job.growths:
        return -inf
    return job.grown_at + config.regrow_s * float(2 ** min(job.growths - 1, MOST_DOUBLINGS))
