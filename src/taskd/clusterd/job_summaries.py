"""Keeps the summary of every job of the cluster: in ConfigMaps, and for subscribers.

Each change is noted at once and written a moment later, so that the many changes of a job that
starts are one write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from taskd.clusterd.cluster.in_memory import version_of
from taskd.clusterd.cluster.interface import (
    Changed,
    Cluster,
    ClusterRefused,
    ClusterUnreachable,
    Json,
    Key,
    Kind,
    owner_of,
    owners_of,
)
from taskd.clusterd.cluster.objects import DECLARED, annotations_of, labels_of
from taskd.clusterd.cluster.summary_objects import (
    DELETE,
    JobSummary,
    dated_as_written,
    is_summarized,
    summary_maps,
    summary_of,
)
from taskd.clusterd.job_registry import JobRegistry
from taskd.model.ids import JobId
from taskd.runtime.clock import Clock

log = logging.getLogger(__name__)

GATHER_S = 0.2
"""How long to gather changes before they are written."""
DELETED_S = 60.0
"""How long the summary of a deleted job says so, before it is removed."""
AGAIN_S = 5.0
"""Pause before a write that failed is tried again."""


class JobSummaries:
    def __init__(self, jobs: JobRegistry, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self.known: dict[JobId, JobSummary] = {}
        self.listeners: set[Callable[[JobSummary], None]] = set()
        self._maps: dict[JobId, dict[Key, Json]] = {}
        self._dirty: set[JobId] = set()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._removals: dict[JobId, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        jobs.on_change.append(self._changed)

    def start(self) -> None:
        groups = self._cluster.all(Kind.POD_GROUP)
        self._note({JobId(owner_of(group)[0]) for group in groups})
        self._task = asyncio.create_task(self._work(), name="job summaries")

    async def close(self) -> None:
        for timer in self._removals.values():
            timer.cancel()
        tasks = [task for task in (self._task, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _changed(self, change: Changed | None) -> None:
        if change is not None and change.key.kind in (Kind.POD, Kind.POD_GROUP):
            bodies = [body for body in (change.before, change.after) if body is not None]
            self._note({JobId(owner_of(body)[0]) for body in bodies})

    def _note(self, jobs: set[JobId]) -> None:
        self._dirty |= jobs - {JobId("")}
        self._wake.set()

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            jobs, self._dirty = self._dirty, set()
            for job in sorted(jobs):
                try:
                    await self._refresh(job)
                except (ClusterRefused, ClusterUnreachable) as error:
                    log.warning("job=%s summary not written, trying again: %s", job, error)
                    asyncio.get_running_loop().call_later(AGAIN_S, self._note, {job})
                except Exception:
                    # One odd object must not stop the summaries of all other jobs.
                    log.exception("job=%s cannot be summarized", job)

    async def _refresh(self, job: JobId) -> None:
        groups = self._cluster.find(Kind.POD_GROUP, job)
        now = int(self._clock())
        if not groups:
            await self._gone(job, now)
            return
        group = groups[0]
        if not is_summarized(group) or DECLARED in annotations_of(group):
            return
        owners, labels = owners_of(group), labels_of(group)
        summary = summary_of(group, self._cluster.find(Kind.POD, job), now)
        if job not in self.known:
            maps = summary_maps(summary, owners, labels)
            written = {key: body for key in maps if (body := self._cluster.get(key)) is not None}
            summary = dated_as_written(summary, maps, written)
        if not summary.same_as(self.known.get(job)):
            self._tell(summary)
        if job in self._removals:
            self._removals.pop(job).cancel()
        maps = summary_maps(self.known[job], owners, labels)
        stale = set(self._maps.get(job, ())) - set(maps)
        await self._write(maps)
        self._maps[job] = maps
        for key in stale:
            await self._write({key: {"data": {"operator": DELETE}}})

    async def _gone(self, job: JobId, now: int) -> None:
        known = self.known.pop(job, None)
        if known is None:
            return
        gone = replace(known, operator=DELETE, changed_at=now, deleted_at=now)
        for listener in list(self.listeners):
            listener(gone)
        marks = {"operator": DELETE, "time": str(now), "deleteTime": str(now)}
        keys = list(self._maps.pop(job, ()))
        loop = asyncio.get_running_loop()
        self._removals[job] = loop.call_later(DELETED_S, self._remove, job, keys)
        await self._write({key: {"data": marks} for key in keys if self._cluster.get(key)})

    def _tell(self, summary: JobSummary) -> None:
        self.known[summary.job] = summary
        for listener in list(self.listeners):
            listener(summary)

    async def _write(self, maps: dict[Key, Json]) -> None:
        for key, body in maps.items():
            current = self._cluster.get(key)
            if current is None:
                await self._cluster.create(key, body)
            elif any(current.get("data", {}).get(k) != v for k, v in body["data"].items()):
                await self._cluster.patch(key, body, version_of(current) or None)

    def _remove(self, job: JobId, keys: list[Key]) -> None:
        self._removals.pop(job, None)
        task = asyncio.ensure_future(self._delete(keys))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _delete(self, keys: list[Key]) -> None:
        """In Kubernetes they go with the job, because its owner is theirs."""
        for key in keys:
            try:
                await self._cluster.delete(key)
            except (ClusterRefused, ClusterUnreachable) as error:
                log.debug("%s is left to the cluster: %s", key, error)
