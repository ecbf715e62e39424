"""What the manager of one job tells Prometheus: steps, goodput, incidents, phases, stragglers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from taskd.core.goodput import Goodput
from taskd.edge.clock import monotonic
from taskd.edge.metrics import Metric, Sample, one
from taskd.manager.settings import ManagerConfig
from taskd.manager.status import Seen, progress_of
from taskd.model.job import Story


class Meter:
    def __init__(self, config: ManagerConfig, look: Callable[[], Seen]) -> None:
        self._config, self._look = config, look
        self._goodput = Goodput(monotonic())

    def beat(self) -> None:
        """A node has told how its ranks are doing."""
        steps = [progress.step for progress in self._look().progress.values()]
        self._goodput = self._goodput.at(max(steps, default=0), monotonic())

    def metrics(self) -> Iterable[Metric]:
        seen = self._look()
        told = progress_of(self._config, seen)
        now, goodput, job = monotonic(), self._goodput, self._config.job_id
        yield one("taskd_step", "The highest committed step.", told.step, job=job)
        yield one("taskd_steps_total", "Steps committed.", goodput.steps, "counter", job=job)
        yield one("taskd_steps_per_second", "The usual pace.", goodput.steps_per_s, job=job)
        yield one(
            "taskd_goodput_ratio",
            "Share of this manager's life spent in committed steps.",
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
            "taskd_wall_seconds_total", "Time lived.", now - goodput.began, "counter", job=job
        )
        yield one("taskd_world_size", "Ranks that train together.", told.world, job=job)
        phases = Counter(rank.phase for rank in told.ranks)
        yield Metric(
            "taskd_ranks",
            "Ranks by phase.",
            tuple(Sample(n, {"job": job, "phase": phase}) for phase, n in sorted(phases.items())),
        )
        yield from _incidents(job, seen.state.job.stories)
        yield Metric(
            "taskd_straggler",
            "1 for each rank that holds the others up.",
            tuple(
                Sample(1, {"job": job, "rank": str(slow.rank), "cause": slow.cause})
                for slow in told.stragglers
            ),
        )
        yield one(
            "taskd_operation_running",
            "1 while a stress test or a link switch runs.",
            float(bool(seen.operation)),
            job=job,
        )
        state = type(seen.state).__name__
        yield one("taskd_manager_state", "1 for the state it is in.", 1, job=job, state=state)


def _incidents(job: str, stories: tuple[Story, ...]) -> Iterable[Metric]:
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[tuple[str, str]] = Counter()
    for story in stories:
        key = story.strategy or "none", story.outcome or "open"
        counts[key] += 1
        seconds[key] += story.moments[-1][1] - story.moments[0][1]  # type: ignore[assignment]
    for name, text, sums in (
        ("taskd_incidents_total", "Incidents by strategy and outcome.", counts),
        ("taskd_recovery_seconds_total", "Time from a fault to the next step.", seconds),
    ):
        samples = tuple(
            Sample(value, {"job": job, "strategy": strategy, "outcome": outcome})
            for (strategy, outcome), value in sorted(sums.items())
        )
        yield Metric(name, text, samples, "counter")
    if stories:
        last = stories[-1].moments
        yield one(
            "taskd_last_recovery_seconds", "The newest of these.", last[-1][1] - last[0][1], job=job
        )
