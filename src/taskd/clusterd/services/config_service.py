"""The Config service: the rank table of an inference job, whenever it changes."""

from __future__ import annotations

from typing import Any

from taskd.clusterd.cluster.inference_table import RINGS, inference_table
from taskd.clusterd.cluster.interface import Changed, Cluster, Kind
from taskd.clusterd.cluster.objects import text_at
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.services.level_streams import LevelStreams
from taskd.model.codes import RecoverCode
from taskd.runtime.plain_text import is_plain
from taskd.wire._pb import config_pb2 as pb
from taskd.wire._pb.config_pb2_grpc import ConfigServicer

MAX_ID = 253


class ConfigService(ConfigServicer):
    def __init__(self, jobs: JobRegistry, cluster: Cluster) -> None:
        self._cluster = cluster
        self._streams: LevelStreams[str] = LevelStreams()
        jobs.on_change.append(self._changed)

    def close(self) -> None:
        self._streams.close()

    def _changed(self, change: Changed | None) -> None:
        if change is not None and change.key.kind in (Kind.POD, Kind.CONFIG_MAP):
            self._streams.wake()

    async def Register(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        job = request.jobId
        if not job or len(job) > MAX_ID or not is_plain(job):
            return pb.Status(code=RecoverCode.InvalidReqParam, info="jobId is not valid")
        if not self._streams.register(job):
            code = RecoverCode.OutOfMaxServeJobs
            return pb.Status(code=code, info=code.sentence)
        return pb.Status(code=RecoverCode.OK, info="register success")

    async def SubscribeRankTable(self, request: pb.ClientInfo, context: Any) -> None:
        sent = [""]

        def look() -> list[pb.RankTableStream]:
            table = self._table(request.jobId)
            if not table or table == sent[0]:
                return []
            sent[0] = table
            return [pb.RankTableStream(jobId=request.jobId, rankTable=table)]

        await self._streams.serve(request.jobId, context, look)

    def _table(self, job: str) -> str:
        maps = self._cluster.all(Kind.CONFIG_MAP)
        rings = [body for body in maps if text_at(body, "metadata", "name").startswith(RINGS)]
        return inference_table(job, self._cluster.all(Kind.POD), rings)
