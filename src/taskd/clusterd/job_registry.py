"""All jobs of this server: which are known, which are served, and their owners.

A job is known once Init has found it in the cluster. It is served once Register has given it an
owner. Served jobs are in the journal, and get their owners back after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from operator import is_not
from secrets import token_hex

from taskd.clusterd import act
from taskd.clusterd.cluster import declared_jobs as declare
from taskd.clusterd.cluster.declared_jobs import Declaration
from taskd.clusterd.cluster.interface import (
    Changed,
    Cluster,
    ClusterRefused,
    ClusterUnreachable,
    Json,
    Key,
    Kind,
    key_of,
    owner_of,
)
from taskd.clusterd.cluster.objects import JobFacts, facts_of
from taskd.clusterd.faults.fault_centre import FaultCentre
from taskd.clusterd.job_owner import Answer, JobOwner, OwnerContext
from taskd.clusterd.job_views import JobViews
from taskd.clusterd.keyed_lock import KeyedLock
from taskd.clusterd.records import journal_records as records
from taskd.core.clusterd.job_config import ON, RecoveryConfig
from taskd.core.clusterd.states import Ended, Idle
from taskd.model.clusterd import (
    JobDeleted,
    JobRegistered,
    Unsubscribed,
)
from taskd.model.codes import RecoverCode
from taskd.model.ids import JobId
from taskd.model.strategies import Strategy
from taskd.runtime.clock import Clock
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalFailed
from taskd.runtime.plain_text import is_plain
from taskd.wire.tagged_json import UnreadableRecord

log = logging.getLogger(__name__)

UNREADABLE = (UnreadableRecord, ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading a record raises that another version or another program wrote."""

ABANDONED_S = 300.0
"""A full server ends a declared job whose client has been away for so long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegistryConfig:
    max_jobs: int = 10_000
    """How many jobs are served at the same time."""
    strategies: tuple[Strategy, ...] | None = None
    """For jobs without a declaration; None: such jobs are refused."""
    delete_pods: bool = False
    """Delete pods that must be replaced; else the scheduler does."""
    inbox: int = 64
    """How many reports of one job may wait."""
    signals: int = 64
    """How many signals may wait for a slow listener."""


class JobRegistry:
    def __init__(
        self,
        journal: Journal,
        cluster: Cluster,
        clock: Clock,
        config: RegistryConfig,
        recovery: RecoveryConfig,
    ) -> None:
        self._journal, self._cluster, self._config = journal, cluster, config
        self.served: dict[JobId, JobOwner] = {}
        self.faults = FaultCentre(cluster, clock)
        self.views = JobViews(self.served, self.facts, self.faults, clock, self._faults_changed)
        self._context = OwnerContext(
            journal,
            cluster,
            self.facts,
            clock,
            recovery,
            config.inbox,
            config.signals,
            self.views.decided,
        )
        self._known: set[JobId] = set()
        self._declared: dict[JobId, Declaration] = {}
        self._job_locks: KeyedLock[JobId] = KeyedLock()
        """Registering, declaring and ending one job exclude each other; other jobs do not wait."""
        self._read: dict[JobId, tuple[list[Json], JobFacts]] = {}
        self.on_change: list[Callable[[Changed | None], None]] = []
        """Called after every change of the cluster; with None after other news about faults."""
        self.on_forgotten: list[Callable[[JobId], None]] = []
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Continue every job where the journal left it."""
        notes = await self._journal.notes()
        for declaration in declare.from_notes(notes):
            if taken := self._taken(declaration):
                log.error("job=%s must be declared again: %s has its name", declaration.job, taken)
                continue
            await self._make_known(declaration)
        for name, text in (await self._journal.records()).items():
            job = JobId(name)
            try:
                record = records.read(job, text, notes)
            except UNREADABLE as error:
                log.error(
                    "job=%s cannot be restored from the journal and must register again: %s",
                    job,
                    error,
                )
                continue
            self._known.add(job)
            self._serve(job, record)
            if record.state.job.subscribed:
                self.served[job].post(Unsubscribed())
        self._watching = asyncio.create_task(self._watch(self._cluster.changes()))
        for job in self.served:
            try:
                self.views.post(job)
            except Exception:
                # What is wrong with the objects of one job must not stop the server of all.
                log.exception("job=%s could not process its objects", job)

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self.views.close()
        for owner in list(self.served.values()):
            await owner.close()

    def get(self, job: str) -> JobOwner | None:
        return self.served.get(JobId(job))

    def is_served(self, job: str) -> bool:
        return job in self.served

    def facts(self, job: JobId) -> JobFacts | None:
        """What the cluster says now; None if the job is unknown.

        Cached; read again if one of the objects has been replaced.
        """
        groups = self._cluster.find(Kind.POD_GROUP, job)
        if not groups:
            return None
        objects = [groups[0], *self._cluster.find(Kind.POD, job)]
        before, facts = self._read.get(job, ([], None))
        if facts is None or len(before) != len(objects) or any(map(is_not, before, objects)):
            known = facts.mistakes if facts else ()
            facts = self._facts(objects)
            self._read[job] = (objects, facts)
            for mistake in facts.mistakes:
                if mistake not in known:
                    log.warning("job=%s %s", job, mistake)
        return facts

    def _facts(self, objects: list[Json]) -> JobFacts:
        facts = facts_of(objects[0], objects[1:])
        config = facts.config
        # Where a platform confirms every fault, it also decides about the pods.
        deletes = self._config.delete_pods and config.cluster and not config.platform
        return replace(facts, config=replace(config, deletes_pods=deletes))

    def named(self, namespace: str, name: str) -> list[JobId]:
        """The jobs of this id or name. A tenant may have given its job the name of another's."""
        groups = [
            owner_of(group)
            for group in self._cluster.all(Kind.POD_GROUP)
            if key_of(group).namespace == namespace
        ]
        with_id = [JobId(uid) for uid, _ in groups if uid == name]
        return with_id or [JobId(uid) for uid, owner in groups if owner == name]

    def waiting(self) -> list[Declaration]:
        """The declared jobs that no client has registered yet."""
        return [one for job, one in self._declared.items() if job not in self.served]

    # Init, register, declare, end

    async def init(self, job: JobId) -> Answer:
        if job in self._known:
            return Answer.of(RecoverCode.OK)
        if not job or len(job) > declare.MAX_NAME or not is_plain(job):
            return Answer.of(RecoverCode.InvalidReqParam, "the job has no valid id")
        facts = self.facts(job)
        if facts is None and self._config.strategies is not None:
            if not await self._has_room_to_declare():
                return Answer.of(RecoverCode.OutOfMaxServeJobs)
            await self._make_known(Declaration(job, ",".join(self._config.strategies), name=job))
            facts = self.facts(job)
        if facts is None:
            return Answer.of(
                RecoverCode.OperatePodGroupError, "the cluster has no PodGroup for this job"
            )
        if not facts.enabled:
            return Answer.of(RecoverCode.ProcessRecoverEnableOff)
        self._known.add(job)
        return Answer.of(RecoverCode.OK)

    async def register(self, job: JobId) -> Answer:
        async with self._job_locks.hold(job):
            if job not in self._known:
                return Answer.of(RecoverCode.UnInit)
            facts = self.facts(job)
            if facts is None:
                self._known.discard(job)
                return Answer.of(RecoverCode.JobNotExist)
            if job in self.served:
                return await self._registered(self.served[job], facts)
            if len(self.served) >= self._config.max_jobs and not await self._make_room():
                return Answer.of(RecoverCode.OutOfMaxServeJobs)
            try:
                await act.clear_reset(facts, self._cluster, self._context.clock())
            except (ClusterRefused, ClusterUnreachable) as error:
                return Answer.of(RecoverCode.OperateConfigMapError, str(error))
            try:
                await self._cluster.patch(facts.pod_group, {"metadata": {"labels": {ON: "on"}}})
            except (ClusterRefused, ClusterUnreachable) as error:
                return Answer.of(RecoverCode.OperatePodGroupError, str(error))
            owner = self._serve(job, records.first(job))
            answer = await self._registered(owner, facts)
            if answer.code != RecoverCode.OK:
                del self.served[job]
                await owner.close()
            return answer

    async def _registered(self, owner: JobOwner, facts: JobFacts) -> Answer:
        """Also for a job that is already served: it may have changed or been restarted."""
        answer = await owner.ask(JobRegistered(owner.job, facts.config, token_hex(16), facts.name))
        if answer.code != RecoverCode.OK:
            return answer
        self.views.post_again(owner.job)
        return Answer.of(RecoverCode.OK, "register success")

    async def declare(self, declaration: Declaration) -> Answer:
        async with self._job_locks.hold(declaration.job):
            if declaration.job not in self._declared:
                if not await self._has_room_to_declare():
                    return Answer.of(RecoverCode.OutOfMaxServeJobs)
                if self._cluster.find(Kind.POD_GROUP, declaration.job):
                    return Answer.of(
                        RecoverCode.InvalidReqParam, "the cluster already describes this job"
                    )
            if taken := self._taken(declaration):
                return Answer.of(
                    RecoverCode.InvalidReqParam,
                    f"{taken} belongs to another job: choose another id or namespace",
                )
            try:
                await self._journal.note(*declare.to_note(declaration))
                await self._make_known(declaration)
            except JournalFailed as error:
                return Answer.of(RecoverCode.ServerInnerError, str(error))
            except (ClusterRefused, ClusterUnreachable) as error:
                return Answer.of(RecoverCode.OperatePodGroupError, str(error))
            owner, facts = self.served.get(declaration.job), self.facts(declaration.job)
            if owner is not None and facts is not None:
                if facts.config != owner.state.job.config:
                    owner.post(
                        JobRegistered(
                            declaration.job, facts.config, owner.state.job.seed, facts.name
                        )
                    )
                self.views.post(declaration.job)
            return Answer.of(RecoverCode.OK)

    async def end(self, job: JobId, because: str) -> Answer:
        """The job is over. Its history stays in the journal."""
        async with self._job_locks.hold(job):
            owner = self.served.get(job)
            if owner is not None:
                answer = await owner.ask(JobDeleted(because))
                if answer.code == RecoverCode.ServerInnerError:
                    return answer
                del self.served[job]
                await owner.close()
                log.info("job=%s has ended: %s", job, because)
            try:
                await self._forget(job)
            except (JournalFailed, ClusterUnreachable) as error:
                return Answer.of(RecoverCode.ServerInnerError, str(error))
            return Answer.of(RecoverCode.OK)

    async def _forget(self, job: JobId) -> None:
        self._known.discard(job)
        self.views.forget(job)
        self.faults.forget(job)
        for forget in self.on_forgotten:
            forget(job)
        declared = self._declared.pop(job, None)
        if declared is not None:
            for name in (declare.note_name(job), f"trace/{job}"):
                await self._journal.note(name, None)
            for key, _ in declare.objects_of(declared):
                await self._cluster.delete(key)
        self._read.pop(job, None)

    async def _has_room_to_declare(self) -> bool:
        """If not, forget the oldest declaration that no client has registered, or end a job."""
        if len(self._declared) < self._config.max_jobs:
            return True
        if waiting := self.waiting():
            await self._forget(waiting[0].job)
            return True
        return await self._make_room()

    async def _make_room(self) -> bool:
        """End the declared job whose client has been away for longest: it ended without EndJob."""
        now = self._context.clock()
        abandoned = [
            owner
            for owner in self.served.values()
            if self._is_not_of_a_cluster(owner.job)
            and isinstance(owner.state, Idle | Ended)
            and not owner.signals.connected
            and now - owner.client_changed_at > ABANDONED_S
        ]
        if not abandoned:
            return False
        oldest = min(abandoned, key=lambda owner: owner.client_changed_at)
        answer = await self.end(oldest.job, "no client has been subscribed for a long time")
        return answer.code == RecoverCode.OK

    def _is_not_of_a_cluster(self, job: JobId) -> bool:
        """Its clients alone say that it exists, also after a restart of this server."""
        return job in self._declared or not self._cluster.find(Kind.POD_GROUP, job)

    def _serve(self, job: JobId, record: records.Record) -> JobOwner:
        owner = self.served[job] = JobOwner(job, record, self._context)
        return owner

    def _taken(self, declaration: Declaration) -> Key | None:
        """An object of another job that has the name of one of this declaration's."""
        found = ((key, self._cluster.get(key)) for key, _ in declare.objects_of(declaration))
        others = (key for key, body in found if body and owner_of(body)[0] != declaration.job)
        return next(others, None)

    async def _make_known(self, declaration: Declaration) -> None:
        before = self._declared.get(declaration.job)
        wanted = dict(declare.objects_of(declaration))
        self._declared[declaration.job] = declaration
        for key, body in wanted.items():
            if self._cluster.get(key) is None:
                await self._cluster.create(key, body)
            else:
                await self._cluster.patch(key, body)
        if before is not None:
            for key, _ in declare.objects_of(before):
                if key not in wanted:
                    await self._cluster.delete(key)

    # Changes of the cluster

    async def _watch(self, changes: AsyncIterator[Changed]) -> None:
        async for change in changes:
            for job in self._touched(change):
                try:
                    if not self._cluster.find(Kind.POD_GROUP, job):
                        await self.end(job, "the cluster has deleted the job")
                    else:
                        self.views.post(job)
                except Exception:
                    # An internal error of one job must not keep the change from all others.
                    log.exception("job=%s could not process the change of %s", job, change.key)
            for react in self.on_change:
                try:
                    react(change)
                except Exception:
                    log.exception("object=%s could not process its change", change.key)

    def _touched(self, change: Changed) -> set[JobId]:
        if change.key.kind is Kind.CONFIG_MAP:
            node = self.faults.node_of(change.key)
            return set() if node is None else self.views.jobs_on({node})
        owners = {owner_of(body)[0] for body in (change.before, change.after) if body is not None}
        return {JobId(owner) for owner in owners if owner in self.served}

    def _faults_changed(self) -> None:
        for react in self.on_change:
            react(None)
