"""The manager's Prometheus metrics: steps, goodput, incidents, phases, stragglers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from taskd.core.manager.watch.goodput import Goodput
from taskd.manager.reports.job_status import JobSnapshot, progress_of
from taskd.manager.settings import ManagerConfig
from taskd.model.manager import IncidentRecord
from taskd.runtime.clock import monotonic
from taskd.runtime.metrics import Metric, Sample, one


class JobMetrics:
    def __init__(self, config: ManagerConfig, look: Callable[[], JobSnapshot]) -> None:
        self._config, self._look = config, look
        self._goodput = Goodput(monotonic())
        self._incidents = IncidentCounters()

    def update(self) -> None:
        """Update the counters after a heartbeat."""
        seen = self._look()
        steps = [progress.step for progress in seen.progress.values()]
        self._goodput = self._goodput.at(max(steps, default=0), monotonic())
        self._incidents.count(seen.state.job.past_incidents)

    def metrics(self) -> Iterable[Metric]:
        seen = self._look()
        progress = progress_of(self._config, seen)
        now, goodput, job = monotonic(), self._goodput, self._config.job_id
        yield one("taskd_step", "The highest committed step.", progress.step, job=job)
        yield one("taskd_steps_total", "Steps committed.", goodput.steps, "counter", job=job)
        yield one(
            "taskd_steps_per_second",
            "Usual number of steps per second.",
            goodput.steps_per_s,
            job=job,
        )
        yield one(
            "taskd_goodput_ratio",
            "Share of this manager's uptime spent in committed steps.",
            goodput.share(now),
            job=job,
        )
        yield one(
            "taskd_productive_seconds_total",
            "Time spent in committed steps.",
            goodput.productive_s,
            "counter",
            job=job,
        )
        yield one(
            "taskd_wall_seconds_total",
            "Uptime of this manager.",
            now - goodput.began,
            "counter",
            job=job,
        )
        yield one("taskd_world_size", "Ranks that train together.", progress.world, job=job)
        phases = Counter(rank.phase for rank in progress.ranks)
        yield Metric(
            "taskd_ranks",
            "Ranks by phase.",
            tuple(Sample(n, {"job": job, "phase": phase}) for phase, n in sorted(phases.items())),
        )
        self._incidents.count(seen.state.job.past_incidents)
        yield from self._incidents.metrics(job)
        yield Metric(
            "taskd_straggler",
            "1 for each straggler.",
            tuple(
                Sample(1, {"job": job, "rank": str(slow.rank), "cause": slow.cause})
                for slow in progress.stragglers
            ),
        )
        yield one(
            "taskd_operation_running",
            "1 while a stress test or a NIC switch runs.",
            float(bool(seen.operation)),
            job=job,
        )
        state = type(seen.state).__name__
        yield one(
            "taskd_manager_state", "1 for the manager's current state.", 1, job=job, state=state
        )


class IncidentCounters:
    """Counters over all incidents, although the manager keeps only the newest records."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seconds: Counter[tuple[str, str]] = Counter()
        self._last: IncidentRecord | None = None

    def count(self, records: Sequence[IncidentRecord]) -> None:
        """Count the incidents since the last call. Must be called before records are dropped."""
        new = list(takewhile(lambda record: record is not self._last, reversed(records)))
        for record in new:
            key = record.strategy or "none", record.outcome or "open"
            self._counts[key] += 1
            self._seconds[key] += _duration_s(record)  # type: ignore[assignment]
        self._last = records[-1] if records else self._last

    def metrics(self, job: str) -> Iterable[Metric]:
        for name, text, sums in (
            ("taskd_incidents_total", "Incidents by strategy and outcome.", self._counts),
            ("taskd_recovery_seconds_total", "Time from a fault to the next step.", self._seconds),
        ):
            samples = tuple(
                Sample(value, {"job": job, "strategy": strategy, "outcome": outcome})
                for (strategy, outcome), value in sorted(sums.items())
            )
            yield Metric(name, text, samples, "counter")
        if self._last is not None:
            newest = _duration_s(self._last)
            yield one(
                "taskd_last_recovery_seconds", "Duration of the newest recovery.", newest, job=job
            )


def _duration_s(record: IncidentRecord) -> float:
    return record.timestamps[-1][1] - record.timestamps[0][1]
