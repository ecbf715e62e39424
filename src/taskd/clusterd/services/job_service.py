"""The Job service: subscribers get the summary of every job, and every change of one.

A subscriber that reads slowly gets the newest summary of each job, and misses none.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from secrets import token_hex
from typing import Any
from uuid import uuid4

import grpc

from taskd.clusterd.cluster.summary_objects import JobSummary, rank_tables
from taskd.clusterd.job_summaries import JobSummaries
from taskd.clusterd.listeners import SUBSCRIBED
from taskd.clusterd.services.level_streams import abort
from taskd.model.codes import RecoverCode
from taskd.model.ids import JobId
from taskd.runtime.clock import Clock
from taskd.wire._pb import job_pb2 as pb
from taskd.wire._pb.job_pb2_grpc import JobServicer

ROLES = ("CCAgent", "DefaultUser1", "DefaultUser2", "FdAgent")
MAX_CLIENTS = 10_000
"""Registered and not subscribed; the oldest is forgotten."""
MAX_PER_ROLE = 20
BATCH_RANKS = 40_000
"""Ranks in one message of the list. A larger job is sent alone, without its rank table."""


class _Inbox:
    """The newest summary of each job that one subscriber has not received yet."""

    def __init__(self) -> None:
        self.waiting: OrderedDict[JobId, JobSummary] = OrderedDict()
        self.news = asyncio.Event()

    def put(self, summary: JobSummary) -> None:
        self.waiting[summary.job] = summary
        self.news.set()

    async def take(self) -> JobSummary:
        while not self.waiting:
            self.news.clear()
            await self.news.wait()
        return self.waiting.popitem(last=False)[1]


class JobService(JobServicer):
    def __init__(self, summaries: JobSummaries, clock: Clock) -> None:
        self._summaries, self._clock = summaries, clock
        self._clients: OrderedDict[str, str] = OrderedDict()
        """The role of each client id."""
        self._subscribed: Counter[str] = Counter()
        self._streams: set[asyncio.Task[Any]] = set()

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def Register(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        if request.role not in ROLES:
            text = f"unknown role (expected {', '.join(ROLES)})"
            return pb.Status(code=RecoverCode.UnRegistry, info=text)
        client = str(uuid4())
        self._clients[client] = request.role
        if len(self._clients) > MAX_CLIENTS:
            self._clients.popitem(last=False)
        code = RecoverCode.SuccessCode
        return pb.Status(code=code, info=code.sentence, clientId=client)

    async def SubscribeJobSummarySignal(self, request: pb.ClientInfo, context: Any) -> None:
        await self._stream(request, context, whole=False)

    async def SubscribeJobSummarySignalList(self, request: pb.ClientInfo, context: Any) -> None:
        await self._stream(request, context, whole=True)

    async def _stream(self, request: pb.ClientInfo, context: Any, whole: bool) -> None:
        """`whole`: all known jobs first, in lists; each later change is a list of one."""
        role = self._clients.get(request.clientId)
        if role is None or role != request.role:
            await abort(context, grpc.StatusCode.FAILED_PRECONDITION, "register first")
        if self._subscribed[role] >= MAX_PER_ROLE:
            text = f"{MAX_PER_ROLE} clients with role {role} have subscribed: end one first"
            await abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        inbox = _Inbox()
        self._summaries.listeners.add(inbox.put)
        self._subscribed[role] += 1
        stream = asyncio.current_task()
        assert stream is not None
        self._streams.add(stream)
        try:
            await context.send_initial_metadata(SUBSCRIBED)
            known = list(self._summaries.known.values())
            if whole:
                for batch in _batches(known):
                    await context.write(self._list(batch, len(known)))
            else:
                for summary in known:
                    inbox.put(summary)
            while True:
                summary = await inbox.take()
                one = self._list([summary], 1) if whole else _signal(summary)
                await context.write(one)
        finally:
            self._streams.discard(stream)
            self._subscribed[role] -= 1
            self._summaries.listeners.discard(inbox.put)

    def _list(self, summaries: list[JobSummary], total: int) -> pb.JobSummarySignalList:
        return pb.JobSummarySignalList(
            jobSummarySignals=map(_signal, summaries),
            ReportTime=str(round(self._clock() * 1000)),
            JobTotalNum=total,
        )


def _batches(summaries: list[JobSummary]) -> list[list[JobSummary]]:
    batches: list[list[JobSummary]] = [[]]
    ranks = 0
    for summary in summaries:
        if batches[-1] and ranks + summary.ranks > BATCH_RANKS:
            batches.append([])
            ranks = 0
        batches[-1].append(summary)
        ranks += summary.ranks
    return batches


def _signal(summary: JobSummary) -> pb.JobSummarySignal:
    tables = rank_tables(summary)
    small = len(tables) == 1 and summary.ranks <= BATCH_RANKS
    return pb.JobSummarySignal(
        uuid=token_hex(16),
        jobId=summary.job,
        jobName=summary.name,
        namespace=summary.namespace,
        frameWork=summary.framework,
        jobStatus=summary.status,
        time=str(summary.changed_at),
        cmIndex="0",
        total=str(len(tables)),
        HcclJson=tables[0] if small else "",
        deleteTime=str(summary.deleted_at or ""),
        sharedTorIp=summary.shared_tor,
        masterAddr=summary.master,
        operator=summary.operator,
        sid=summary.sid,
    )
