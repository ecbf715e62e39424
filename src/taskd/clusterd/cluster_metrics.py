"""clusterd's metrics for Prometheus: states, incidents, rounds and progress of all jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from taskd.clusterd.cluster.interface import Cluster
from taskd.clusterd.job_registry import JobRegistry
from taskd.runtime.metrics import Metric, Sample, one
from taskd.wire._pb.control_pb2 import JobProgress


def metrics(jobs: JobRegistry, cluster: Cluster) -> Iterable[Metric]:
    owners = sorted(jobs.served.items())
    yield Metric(
        "taskd_clusterd_watch_failing",
        "1 for each kind of cluster objects that cannot be watched; the last known ones are used.",
        tuple(Sample(1, {"kind": kind.value}) for kind in sorted(cluster.problems())),
    )
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
    )
    yield Metric(
        "taskd_clusterd_decisions_total",
        "Commands that clusterd has issued, by job.",
        tuple(Sample(o.state.job.sequence, {"job": job}) for job, o in owners),
        "counter",
    )
    yield Metric(
        "taskd_clusterd_subscribed",
        "1 while the job's manager is subscribed.",
        tuple(Sample(o.signals.connected, {"job": job}) for job, o in owners),
    )
    published = [(job, owner.progress) for job, owner in owners if owner.progress is not None]
    yield Metric(
        "taskd_clusterd_step",
        "The highest committed step, as the manager reported it.",
        tuple(Sample(progress.step, {"job": job}) for job, progress in published),
    )
    yield from _progress(published)
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


def _progress(published: Sequence[tuple[str, JobProgress]]) -> Iterable[Metric]:
    """What managers publish about their jobs, except the step."""
    yield Metric(
        "taskd_clusterd_steps_per_second",
        "The pace of the last five seconds, as the manager reported it.",
        tuple(Sample(progress.steps_per_s, {"job": job}) for job, progress in published),
    )
    yield Metric(
        "taskd_clusterd_world_size",
        "Ranks that train together.",
        tuple(Sample(progress.world, {"job": job}) for job, progress in published),
    )
    phases = Counter((job, rank.phase) for job, progress in published for rank in progress.ranks)
    yield Metric(
        "taskd_clusterd_ranks",
        "Ranks by phase.",
        tuple(Sample(n, {"job": j, "phase": phase}) for (j, phase), n in sorted(phases.items())),
    )
    yield Metric(
        "taskd_clusterd_straggler",
        "1 for each rank that slows the others down.",
        tuple(
            Sample(1, {"job": job, "rank": str(slow.rank), "cause": slow.cause})
            for job, progress in published
            for slow in progress.stragglers
        ),
    )
    yield Metric(
        "taskd_clusterd_operation_running",
        "1 while a stress test or a NIC switch runs.",
        tuple(Sample(bool(progress.operation), {"job": job}) for job, progress in published),
    )
