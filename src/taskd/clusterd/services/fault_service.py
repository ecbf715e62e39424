"""The Fault service: subscribers learn which nodes and devices of a job are faulty.

They see what the scheduler sees: a fault that the job is repairing by itself is not shown.
"""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from taskd.clusterd.cluster.interface import Cluster, Kind, owner_of
from taskd.clusterd.cluster.objects import node_addresses
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.services.level_streams import LevelStreams
from taskd.model.codes import RecoverCode
from taskd.model.ids import JobId
from taskd.runtime.plain_text import is_plain
from taskd.wire._pb import fault_pb2 as pb
from taskd.wire._pb.fault_pb2_grpc import FaultServicer
from taskd.wire.fault_codec import NORMAL, fault_signal

CLUSTER = "-1"
"""The job id that stands for all jobs."""
MAX_ID = 128

Client = tuple[str, str]
"""Job and role."""


class FaultService(FaultServicer):
    def __init__(self, jobs: JobRegistry, cluster: Cluster) -> None:
        self._jobs, self._cluster = jobs, cluster
        self._streams: LevelStreams[Client] = LevelStreams()
        jobs.on_change.append(lambda _: self._streams.wake())

    def close(self) -> None:
        self._streams.close()

    async def Register(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        client = _client(request)
        if not request.role or not is_plain(request.role) or len(request.role) > MAX_ID:
            return _status(RecoverCode.InvalidReqParam, "role must name the client")
        if client[0] != CLUSTER and self._jobs.facts(JobId(client[0])) is None:
            return _status(RecoverCode.JobNotExist)
        if not self._streams.register(client):
            return _status(RecoverCode.OutOfMaxServeJobs)
        return _status(RecoverCode.SuccessCode, "register success")

    async def SubscribeFaultMsgSignal(self, request: pb.ClientInfo, context: Any) -> None:
        client, sent = _client(request), dict[JobId, pb.FaultMsgSignal]()
        await self._streams.serve(client, context, lambda: self._new_signals(client[0], sent))

    async def GetFaultMsgSignal(self, request: pb.ClientInfo, context: Any) -> pb.FaultQueryResult:
        job = request.jobId
        if len(job.encode()) > MAX_ID or not is_plain(job):
            code = RecoverCode.InvalidReqParam
            return pb.FaultQueryResult(code=code, info="jobId is not valid")
        ok = RecoverCode.SuccessCode
        if not job or job == CLUSTER:
            signal = fault_signal(_uuid(), CLUSTER, self._jobs.faults.shown(), self._addresses())
            return pb.FaultQueryResult(code=ok, info=ok.sentence, faultSignal=signal)
        found = self._signal(JobId(job), self._addresses(JobId(job)))
        if found is None:
            return pb.FaultQueryResult(code=ok, info="the job is not known")
        return pb.FaultQueryResult(code=ok, info=ok.sentence, faultSignal=found)

    def _new_signals(
        self, scope: str, sent: dict[JobId, pb.FaultMsgSignal]
    ) -> list[pb.FaultMsgSignal]:
        """What has changed since the last look. A job is healthy until something else is sent."""
        jobs = self._all_jobs() if scope == CLUSTER else [JobId(scope)]
        addresses = self._addresses(None if scope == CLUSTER else jobs[0])
        new = []
        for job in {*jobs, *sent}:
            signal = self._signal(job, addresses) or fault_signal("", job, (), {})
            known = sent.get(job)
            if known is None and signal.signalType == NORMAL:
                continue
            if known is None or list(known.nodeFaultInfo) != list(signal.nodeFaultInfo):
                signal.uuid = _uuid()
                sent[job] = signal
                new.append(signal)
        return new

    def _signal(
        self, job: JobId, addresses: dict[str, tuple[str, str]]
    ) -> pb.FaultMsgSignal | None:
        facts = self._jobs.facts(job)
        if facts is None:
            return None
        return fault_signal(_uuid(), job, self._jobs.faults.shown_to(facts), addresses)

    def _addresses(self, job: JobId | None = None) -> dict[str, tuple[str, str]]:
        pods = self._cluster.all(Kind.POD) if job is None else self._cluster.find(Kind.POD, job)
        return node_addresses(pods, self._cluster.all(Kind.NODE))

    def _all_jobs(self) -> list[JobId]:
        return [JobId(owner_of(group)[0]) for group in self._cluster.all(Kind.POD_GROUP)]


def _client(request: pb.ClientInfo) -> Client:
    return request.jobId or CLUSTER, request.role


def _uuid() -> str:
    return token_hex(16)


def _status(code: RecoverCode, info: str = "") -> pb.Status:
    return pb.Status(code=code, info=info or code.sentence)
