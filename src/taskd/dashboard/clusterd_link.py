"""The dashboard's connection to clusterd. Every call is made with the token of its caller.

When clusterd is away, renewed certificates are used for the next connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc import aio

from taskd.bus.security import ClusterdTlsSettings
from taskd.bus.tls_files import TlsFiles
from taskd.errors import PeerRefused, PeerUnreachable
from taskd.model.codes import RecoverCode, TraceCode
from taskd.runtime.tokens import bearer
from taskd.wire._pb import control_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

TIMEOUT_S = 10.0
OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
AWAY = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
}
FOREIGN = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}

_CONTROL: Any = ControlStub
_RECOVER: Any = RecoverStub
_TRACE: Any = TrainingDataTraceStub


class NotAllowed(PeerRefused):
    """clusterd does not know the token, or the token does not give access."""


class Unknown(PeerRefused):
    """clusterd does not serve the job."""


def complete(status: pb.JobStatus, last: pb.JobStatus) -> pb.JobStatus:
    """Add the parts that were left out because they are those of the last message."""
    if status.same_ranks:
        status.ranks.extend(last.ranks)
        status.nodes.extend(last.nodes)
        status.shards.extend(last.shards)
    if status.same_places:
        status.places.extend(last.places)
    return status


class ClusterdLink:
    def __init__(self, address: str, tls: ClusterdTlsSettings) -> None:
        self.address = address
        self._files = TlsFiles.of(tls)
        self._closing: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._channel = self._files.channel(self.address, OPTIONS)
        self._stubs = _CONTROL(self._channel), _RECOVER(self._channel), _TRACE(self._channel)

    def _renew(self) -> None:
        if self._files.are_renewed():
            closing = asyncio.create_task(self._channel.close(TIMEOUT_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._open()

    async def close(self) -> None:
        await self._channel.close(None)
        await asyncio.gather(*self._closing)

    async def jobs(self, token: str) -> pb.JobList:
        reply: pb.JobList = await self._call("Jobs", pb.JobsRequest(), token)
        return reply

    async def status(self, job: str, token: str) -> pb.JobStatus:
        status: pb.JobStatus = await self._call("Status", pb.JobRequest(job=job), token)
        return status

    async def watch(self, job: str, token: str) -> AsyncIterator[pb.JobStatus]:
        """Every status until the job ends. Raises like all calls when clusterd goes away."""
        request = pb.JobRequest(job=job, changes=True)
        # Each on a connection of its own: clusterd limits the calls of a connection.
        channel = self._files.channel(self.address, (*OPTIONS, OWN_CONNECTION))
        call = _CONTROL(channel).Watch(request, metadata=bearer(token))
        try:
            last = pb.JobStatus()
            async for status in call:
                last = complete(status, last)
                yield last
        except aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            call.cancel()
            await channel.close(None)

    async def history(self, job: str, token: str, after: int = 0) -> list[pb.HistoryLine]:
        request = pb.ReplayRequest(job=job, after=after)
        call = self._method("Replay")(request, metadata=bearer(token), timeout=TIMEOUT_S)
        try:
            return [line async for line in call]
        except aio.AioRpcError as error:
            raise self._translated(error) from error

    async def order(self, method: str, request: Any, token: str) -> str:
        """Call a method that answers with a code; raises PeerRefused unless that is success."""
        answer = await self._call(method, request, token)
        profiling = hasattr(answer, "message")
        text = str(answer.message if profiling else answer.info)
        if answer.code != (TraceCode.OK if profiling else RecoverCode.OK):
            raise PeerRefused(text or f"clusterd refused it with code {answer.code}")
        return text

    async def result(self, method: str, request: Any, token: str, timeout_s: float) -> str:
        """The one message of a stream that tells how an operation ended."""
        call = self._method(method)(request, metadata=bearer(token), timeout=timeout_s)
        try:
            async for reply in call:
                return str(reply.msg)
        except aio.AioRpcError as error:
            raise self._translated(error) from error
        finally:
            call.cancel()
        raise PeerRefused("clusterd closed the stream before it sent the result of the operation")

    def _method(self, name: str) -> Any:
        return next(getattr(stub, name) for stub in self._stubs if hasattr(stub, name))

    async def _call(self, name: str, request: Any, token: str) -> Any:
        try:
            return await self._method(name)(request, metadata=bearer(token), timeout=TIMEOUT_S)
        except aio.AioRpcError as error:
            raise self._translated(error) from error

    def _translated(self, error: aio.AioRpcError) -> PeerRefused | PeerUnreachable:
        text = f"clusterd at {self.address}: {error.details()}"
        if error.code() in AWAY:
            self._renew()
            return PeerUnreachable(text)
        if error.code() in FOREIGN:
            return NotAllowed(text)
        return Unknown(text) if error.code() is grpc.StatusCode.NOT_FOUND else PeerRefused(text)
