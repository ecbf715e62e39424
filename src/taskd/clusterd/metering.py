"""What clusterd tells Prometheus about all its jobs: states, incidents, rounds, progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from taskd.clusterd.jobs import Jobs
from taskd.edge.metrics import Metric, Sample, one


def metrics(jobs: Jobs) -> Iterable[Metric]:
    owners = sorted(jobs.served.items())
    yield one("taskd_clusterd_jobs", "Jobs that are served.", len(owners))
    yield Metric(
        "taskd_clusterd_job_state",
        "1 for the state each job is in.",
        tuple(Sample(1, {"job": j, "state": type(o.state).__name__}) for j, o in owners),
    )
    yield Metric(
        "taskd_clusterd_incident",
        "The number of each job's newest incident.",
        tuple(Sample(o.state.job.incident, {"job": job}) for job, o in owners),
        "counter",
    )
    yield Metric(
        "taskd_clusterd_decisions_total",
        "Commands that clusterd has given, by job.",
        tuple(Sample(o.state.job.sequence, {"job": job}) for job, o in owners),
        "counter",
    )
    yield Metric(
        "taskd_clusterd_subscribed",
        "1 while the job's manager listens.",
        tuple(Sample(o.signals.heard, {"job": job}) for job, o in owners),
    )
    told = [(job, owner.progress) for job, owner in owners if owner.progress is not None]
    yield Metric(
        "taskd_clusterd_step",
        "The highest committed step, as the manager told it.",
        tuple(Sample(progress.step, {"job": job}) for job, progress in told),
    )
    rounds: Counter[tuple[str, str]] = Counter()
    for job, owner in owners:
        rounds.update((job, past.strategy) for past in owner.record.rounds)
    yield Metric(
        "taskd_clusterd_recent_rounds",
        "The last finished rounds of each job, by what ended them.",
        tuple(Sample(n, {"job": j, "strategy": s}) for (j, s), n in sorted(rounds.items())),
    )
    yield Metric(
        "taskd_clusterd_last_round_seconds",
        "How long the newest finished round took.",
        tuple(
            Sample(owner.record.rounds[0].took_s, {"job": job})
            for job, owner in owners
            if owner.record.rounds
        ),
    )
