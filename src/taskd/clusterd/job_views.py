"""What each served job was shown of its cluster: pods, faults and slow ranks, as complete views."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from math import inf

from taskd.clusterd import sense
from taskd.clusterd.cluster.objects import JobFacts
from taskd.clusterd.faults.fault_centre import FaultCentre
from taskd.clusterd.job_owner import JobOwner
from taskd.model.clusterd import Event, FaultsSeen, PodsSeen
from taskd.model.faults import Fault
from taskd.model.ids import JobId, Rank
from taskd.runtime.clock import Clock

log = logging.getLogger(__name__)


class JobViews:
    def __init__(
        self,
        served: Mapping[JobId, JobOwner],
        facts: Callable[[JobId], JobFacts | None],
        faults: FaultCentre,
        clock: Clock,
        faults_changed: Callable[[], None],
    ) -> None:
        """`faults_changed` is called after news about faults that are not a change of an object."""
        self._served, self._facts, self._faults, self._clock = served, facts, faults, clock
        self._faults_changed = faults_changed
        self._last_views: dict[JobId, tuple[Event, ...]] = {}
        self._stragglers: dict[JobId, frozenset[Rank]] = {}
        self._judge_again: dict[JobId, asyncio.TimerHandle] = {}

    def close(self) -> None:
        for timer in self._judge_again.values():
            timer.cancel()

    def forget(self, job: JobId) -> None:
        self._last_views.pop(job, None)
        self._stragglers.pop(job, None)
        if job in self._judge_again:
            self._judge_again.pop(job).cancel()

    def post_again(self, job: JobId) -> None:
        """All of its views, also those that it has seen: its client has registered again."""
        self._last_views.pop(job, None)
        self.post(job)

    def jobs_on(self, nodes: set[str]) -> set[JobId]:
        """By the pods that were posted: an owner knows them only when they are in the journal."""
        return {
            job
            for job in self._served
            for view in self._last_views.get(job, ())
            if isinstance(view, PodsSeen) and any(pod.node in nodes for pod in view.pods)
        }

    def post(self, job: JobId) -> None:
        """Post complete views to the job's owner: each one that differs from the last."""
        owner, facts = self._served.get(job), self._facts(job)
        if owner is None or facts is None:
            return
        owner.namespace = facts.namespace
        views: tuple[Event, ...] = ()
        if facts.pods or facts.config.cluster:
            views = (facts.pods_seen,)
        if facts.config.cluster:
            judged = self._faults.of_job(facts)
            slow = sense.stragglers_seen(facts, self._stragglers.get(job, frozenset()))
            seen = FaultsSeen(tuple(sorted((*judged.seen, *slow))))
            views = (*views, facts.platform, seen)
            self._judge_later(job, judged.again_at)
        before = self._last_views.get(job, ())
        for view in views:
            if view not in before:
                owner.post(view)
        self._last_views[job] = views

    def set_stragglers(self, job: JobId, ranks: set[Rank]) -> None:
        """All ranks that slow the others down now, as the job's manager reports them."""
        self._stragglers[job] = frozenset(ranks)
        self.post(job)

    def _judge_later(self, job: JobId, at: float) -> None:
        """Some faults count only after a while, or only for a while."""
        if job in self._judge_again:
            self._judge_again.pop(job).cancel()
        if at < inf:
            delay = max(0.0, at - self._clock())
            loop = asyncio.get_running_loop()
            self._judge_again[job] = loop.call_later(delay, self._judge, job)

    def _judge(self, job: JobId) -> None:
        self.post(job)
        self._faults_changed()

    def faults_reported(self, job: JobId, faults: Iterable[Fault]) -> None:
        """The job itself has reported these faults: it may repair some without the scheduler."""
        ranks = [fault.rank for fault in faults if fault.kind.retryable]
        if ranks:
            self._faults.reported(job, ranks)
            self._judge(job)

    def public_faults_changed(self, nodes: set[str]) -> None:
        for job in self.jobs_on(nodes):
            try:
                self.post(job)
            except Exception:
                log.exception("job=%s could not process new faults", job)
        self._faults_changed()

    def decided(self, owner: JobOwner) -> None:
        """A pod that will be replaced needs no protection from the scheduler any more."""
        round_ = getattr(owner.state, "round", None)
        nodes = round_.leaving if round_ is not None else frozenset()
        leaving = frozenset(pod.node for pod in owner.state.job.pods if pod.node_rank in nodes)
        if self._faults.set_leaving(owner.job, leaving):
            self._judge(owner.job)
