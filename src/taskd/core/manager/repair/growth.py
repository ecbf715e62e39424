"""When a job that has shrunk offers to grow back, and how long it waits before that.

A node that comes back may be as broken as before. Each time the job shrinks soon after it has
grown, it waits twice as long before it tries again. `strategy_actions.py` does the growing.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from taskd.core.manager.job_view import ProcessState
from taskd.core.manager.repair.rank_placement import missing_ranks, place
from taskd.core.manager.states import Job, JobConfig, Outcome, Training, with_job
from taskd.model.clusterd import StrategiesReport
from taskd.model.strategies import WireStrategy

MOST_DOUBLINGS = 6


def training_state(job: Job, now: float, config: JobConfig) -> Training:
    """The Training state, with a deadline if growing back must wait until then."""
    due = _next_growth_at(job, config)
    return Training(job, due if now < due and missing_ranks(job) else inf)


def offer_growth(state: Training, now: float, config: JobConfig) -> Outcome:
    """Offer to grow if every missing rank has a node on which it could run at once."""
    job = state.job
    placements = place(job, missing_ranks(job), in_place=False)
    if job.ascend or not placements or now < _next_growth_at(job, config):
        return Outcome(state)
    if any(job.view.ranks[rank].process is ProcessState.DONE for rank in job.world):
        return Outcome(state, because="the job is about to finish")
    if not all(job.view.nodes[placement.node].warm for placement in placements):
        return Outcome(state)
    reports = (StrategiesReport((WireStrategy.UPGRADE,), job.uuid),)
    return Outcome(
        with_job(state, offered=True), reports, f"{len(placements)} ranks could come back"
    )


def note_growth(job: Job, now: float) -> Job:
    return replace(job, growths=job.growths + 1, grown_at=now, offered=False)


def note_shrink(job: Job, now: float, config: JobConfig) -> Job:
    settled = now >= job.grown_at + config.settled_s
    return replace(job, growths=0) if settled else job


def _next_growth_at(job: Job, config: JobConfig) -> float:
    if not job.growths:
        return -inf
    return job.grown_at + config.regrow_s * float(2 ** min(job.growths - 1, MOST_DOUBLINGS))
