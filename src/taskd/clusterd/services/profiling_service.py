"""The TrainingDataTrace service: which parts of a job's training are recorded.

The switch is kept in the journal, so that it can be queried and is sent to later subscribers. Pods
that mount its ConfigMap read it from there as well.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import grpc

from taskd.clusterd.cluster.interface import Cluster, ClusterRefused, ClusterUnreachable
from taskd.clusterd.cluster.objects import JobFacts, trace_key
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.listeners import SUBSCRIBED, Channel, End
from taskd.model.codes import TraceCode
from taskd.model.ids import JobId
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalFailed
from taskd.wire._pb import profiling_pb2 as pb
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceServicer
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

FIELDS = ("CommunicationOperator", "Step", "SaveCheckpoint", "FP", "DataLoader")
VALUES = ("on", "off", "")
NOTES = "trace/"
UPDATED = "update profiling switch"
MAX_SUBSCRIBERS = 10_000
WAITING = 64
QUIET_S = 3600.0


class Problem(Exception):
    def __init__(self, code: TraceCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class ProfilingService(TrainingDataTraceServicer):
    def __init__(self, jobs: JobRegistry, cluster: Cluster, journal: Journal) -> None:
        self._jobs, self._cluster, self._journal = jobs, cluster, journal
        self._switches: dict[JobId, pb.ProfilingSwitch] = {}
        self._channels: dict[JobId, Channel[pb.ProfilingSwitch]] = {}
        jobs.on_forgotten.append(self._forget)

    async def start(self) -> None:
        for name, text in (await self._journal.notes()).items():
            if name.startswith(NOTES):
                job = JobId(name.removeprefix(NOTES))
                try:
                    self._switches[job] = pb.ProfilingSwitch(**loads(text))
                except (ValueError, TypeError) as error:
                    log.error("note %r of the journal cannot be read: %s", name, error)

    def _forget(self, job: JobId) -> None:
        self._switches.pop(job, None)
        if job in self._channels:
            self._channels.pop(job).end(End.OVER)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.end(End.OVER)

    async def ModifyTrainingDataTraceSwitch(
        self, request: pb.DataTypeReq, context: Any
    ) -> pb.DataTypeRes:
        try:
            facts = self._find(request.jobNsName)
            switch = _checked(request.profilingSwitch)
            await self._store(facts, switch)
        except Problem as problem:
            return pb.DataTypeRes(message=problem.message, code=problem.code)
        self._switches[facts.job] = switch
        if facts.job in self._channels:
            self._channels[facts.job].put(switch)
        return pb.DataTypeRes(message="the switch is set", code=TraceCode.OK)

    async def GetTrainingDataTraceSwitch(
        self, request: pb.DataStatusReq, context: Any
    ) -> pb.DataStatusRes:
        try:
            job = self._find(request.jobNsName).job
        except Problem as problem:
            return pb.DataStatusRes(message=problem.message, code=problem.code)
        switch = self._switches.get(job)
        if switch is None:
            return pb.DataStatusRes(message="no switch has been set", code=TraceCode.NotFound)
        return pb.DataStatusRes(
            message="the current switch", profilingSwitch=switch, code=TraceCode.OK
        )

    async def SubscribeDataTraceSwitch(self, request: pb.ProfilingClientInfo, context: Any) -> None:
        job = JobId(request.jobId)
        if self._jobs.get(job) is None and self._jobs.facts(job) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the job is not known")
        if job not in self._channels and len(self._channels) >= MAX_SUBSCRIBERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many subscribers")
        channel = self._channels.setdefault(job, Channel(WAITING))
        listener = channel.open()
        if job in self._switches:
            listener.put(self._switches[job])
        try:
            await context.send_initial_metadata(SUBSCRIBED)
            while True:
                item = await listener.next(QUIET_S)
                if isinstance(item, End):
                    await context.abort(
                        grpc.StatusCode.ABORTED,
                        "another client has subscribed, or the job or the server has ended",
                    )
                elif item is not None:
                    await context.write(
                        pb.DataStatusRes(message=UPDATED, profilingSwitch=item, code=TraceCode.OK)
                    )
        finally:
            if channel.close(listener):
                self._channels.pop(job, None)

    def _find(self, ns_name: str) -> JobFacts:
        namespace, slash, name = ns_name.partition("/")
        if not slash or not namespace or not name or "/" in name:
            raise Problem(TraceCode.BadParameter, "jobNsName must be namespace/name")
        found = self._jobs.named(namespace, name)
        if len(found) > 1:
            shown = ", ".join(f"{namespace}/{job}" for job in found[:4])
            text = f"{len(found)} jobs are called {ns_name}: name one by its id, such as {shown}"
            raise Problem(TraceCode.BadParameter, text)
        facts = self._jobs.facts(found[0]) if found else None
        if facts is None:
            raise Problem(TraceCode.NotFound, f"unknown job {ns_name}")
        return facts

    async def _store(self, facts: JobFacts, switch: pb.ProfilingSwitch) -> None:
        """The ConfigMap first: a refused switch must not come back after a restart."""
        text = json.dumps({name: getattr(switch, name) for name in FIELDS})
        written = ""
        try:
            if facts.trace_mounted:
                await self._write_map(facts, text)
                written = f"{trace_key(facts)} has the new switch, but: "
            await self._journal.note(note_name(facts.job), text)
        except (JournalFailed, ClusterRefused, ClusterUnreachable) as error:
            raise Problem(TraceCode.ServerFault, f"{written}{error}") from error

    async def _write_map(self, facts: JobFacts, text: str) -> None:
        key = trace_key(facts)
        body = {
            "apiVersion": "v1",
            "metadata": {
                "labels": {"reset": "true"},
                "ownerReferences": list(facts.owners),
            },
            "data": {"profilingSwitch": text},
        }
        if self._cluster.get(key) is None:
            await self._cluster.create(key, body)
        else:
            await self._cluster.patch(key, body)


def note_name(job: JobId) -> str:
    return f"{NOTES}{job}"


def _checked(switch: pb.ProfilingSwitch) -> pb.ProfilingSwitch:
    wrong = [name for name in FIELDS if getattr(switch, name) not in VALUES]
    if wrong:
        raise Problem(
            TraceCode.BadParameter, f"{', '.join(wrong)}: invalid value (expected on or off)"
        )
    return switch
