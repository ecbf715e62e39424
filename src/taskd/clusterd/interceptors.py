"""Runs before every method: authorization, rate limits, and an answer if the method fails.

An internal error is answered (599, or INTERNAL if the method has no code), logged with its
traceback, and ends only this call. This is the server's only broad `except`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc import aio

from taskd.bus.late_reading import (
    ReadingSlots,
    has_too_much_metadata,
    host_of,
    reading_late,
    refusing,
)
from taskd.clusterd.auth import Authority, Caller
from taskd.model.codes import RecoverCode
from taskd.runtime.clock import Clock
from taskd.runtime.limits.rate_limit import Buckets, Rate
from taskd.runtime.limits.refused_callers import RefusedCallers
from taskd.wire._pb import (
    config_pb2,
    control_pb2,
    fault_pb2,
    job_pb2,
    pubfault_pb2,
    recover_pb2,
)
from taskd.wire.request_weight import RequestWeight

log = logging.getLogger(__name__)


OPERATOR_METHODS = {
    "/taskd.v1.Control/RecordAction",
    "/Recover/SwitchNicTrack",
    "/Recover/SubscribeSwitchNicSignal",
    "/Recover/StressTest",
    "/Recover/SubscribeStressTestResponse",
    "/TrainingDataTrace/ModifyTrainingDataTraceSwitch",
    "/TrainingDataTrace/GetTrainingDataTraceSwitch",
    "/PubFault/SendPublicFault",
    "/job.Job/Register",
    "/job.Job/SubscribeJobSummarySignal",
    "/job.Job/SubscribeJobSummarySignalList",
}
OPEN_METHODS = {"/taskd.v1.Control/Jobs"}
"""They show each caller only its own jobs."""
HEALTH = "/grpc.health.v1.Health/"
OFTEN = {
    "/Recover/HealthCheck",
    "/taskd.v1.Control/PublishProgress",
    "/taskd.v1.Control/ReportIncident",
}
"""Limited separately, so that they never use up the rate that reports need."""
READING = {
    "/taskd.v1.Control/Replay",
    "/taskd.v1.Control/Status",
    "/taskd.v1.Control/Watch",
}
"""The same: people and monitoring look at a job as often as they like."""
INNER = RecoverCode.ServerInnerError.sentence

JOB_RATE, OFTEN_RATE, UNKNOWN_CALLER_RATE = Rate(100, 400), Rate(20, 100), Rate(2_000, 6_000)
LOG_RATE = Rate(0.1, 10)
"""Of refusals, for each machine: a caller that retries forever must not fill the disk."""
TOO_MANY = grpc.StatusCode.RESOURCE_EXHAUSTED, RecoverCode.RateLimited.sentence
MAX_STREAMS = 32
"""Of one job at the same time: its subscriptions. As many others may watch it."""
WATCHED = "watched\n"
"""Before the name of a job: no job's name has a line break."""
REVOKED_S = 2.0
"""How soon a stream ends whose token was revoked."""
MAX_LOGGED = 300
"""Of a refusal, in characters: a caller may send long names."""
LARGE_BYTES, SMALL_BYTES = 2 << 20, 64 << 10
"""The largest request: of methods that name the ranks of a job, and of all others."""
LARGE_REQUESTS = {
    "DeclareJob",
    "PublishProgress",
    "ReportFault",
    "ReportIncident",
    "ReportProcessFault",
    "ReportRecoverStatus",
    "ReportRecoverStrategy",
    "ReportStopComplete",
    "ReportSubHealth",
    "ReplyStressTestResult",
    "SendPublicFault",
    "StressTest",
    "SwitchNicTrack",
}


def limit_bytes(method: str) -> int:
    """The largest request of a method."""
    return LARGE_BYTES if method.rpartition("/")[2] in LARGE_REQUESTS else SMALL_BYTES


def weight_of(method: str) -> RequestWeight:
    service, _, name = method.removeprefix("/").rpartition("/")
    described = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    part_bytes = CHEAP_PART_BYTES if name in CHEAP_PARTS else PART_BYTES
    return RequestWeight(described.input_type, part_bytes)


BYTES_PER_TOKEN, OFTEN_BYTES_PER_TOKEN = 4096, 65536
"""A large request counts as many small ones."""
CALLER_RATE, FREE_BYTES = Rate(1 << 20, 2 << 20), 4 << 10
"""Bytes of each tenant that are parsed, in requests above the second number: parsing comes before
the job is known."""
PART_BYTES, CHEAP_PART_BYTES = 64, 16
"""What each sub-message of a request counts, at least; and where there may be one for each rank
that costs little."""
CHEAP_PARTS = {"PublishProgress", "ReplyStressTestResult"}
HEALTH_STREAMS = 128
"""Of the health service, which every machine may ask: all together."""
KEYS = 20_000
ANSWERS: dict[str, Any] = {
    "Recover": recover_pb2,
    "taskd.v1.Control": control_pb2,
    "PubFault": pubfault_pb2,
    "fault.Fault": fault_pb2,
    "job.Job": job_pb2,
    "config.Config": config_pb2,
}
"""Services whose answers have a code: an internal error is answered with it."""


class AdmissionInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(
        self,
        authority: Authority,
        is_served: Callable[[str], bool],
        clock: Clock,
        job_rate: Rate = JOB_RATE,
        unknown_caller_rate: Rate = UNKNOWN_CALLER_RATE,
    ) -> None:
        self._authority, self._is_served = authority, is_served
        self._jobs = Buckets(job_rate, KEYS, clock)
        self._often = Buckets(OFTEN_RATE, KEYS, clock)
        self._reading = Buckets(job_rate, KEYS, clock)
        self._unknown_callers = Buckets(unknown_caller_rate, KEYS, clock)
        self._callers = Buckets(CALLER_RATE, KEYS, clock)
        self._callers_often = Buckets(CALLER_RATE, KEYS, clock)
        self._logged = Buckets(LOG_RATE, KEYS, clock)
        self._slots = ReadingSlots(self._reader)
        self.refused = RefusedCallers(clock)
        self._guarded: dict[str, Any] = {}
        self._flood = refusing(self.refused.note_flood, TOO_MANY[0], "too much metadata")
        unknown = grpc.StatusCode.UNIMPLEMENTED
        self._unknown = refusing(self.refused.note, unknown, "this server has no such method")
        self._streams: Counter[str] = Counter()
        """How many streams of each job are open, of those who watch it, and of the health
        service."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = details.method
        if has_too_much_metadata(details):
            return self._flood
        if method in self._guarded:
            return self._guarded[method]
        handler = await continuation(details)
        if handler is None:
            return self._unknown
        if method.startswith(HEALTH):
            self._guarded[method] = self._health(method, handler)
            return self._guarded[method]
        serve = handler.unary_stream if handler.response_streaming else handler.unary_unary
        guarded = reading_late(
            handler,
            partial(self._admit_caller, method),
            limit_bytes(method),
            self._slots,
            partial(
                self._serve_stream if handler.response_streaming else self._serve, method, serve
            ),
            partial(self._charge, method),
            weight_of(method),
        )
        self._guarded[method] = guarded
        return guarded

    def _health(self, method: str, handler: Any) -> Any:
        """Open to every machine: nothing of a request is read. All services are one server."""

        async def serve(_: object, context: Any) -> None:
            if not self._unknown_callers.take(host_of(context)):
                await self._refuse(method, context, *TOO_MANY)
            request = handler.request_deserializer(b"")
            if not handler.response_streaming:
                await context.write(await handler.unary_unary(request, context))
                return
            if self._streams[HEALTH] >= HEALTH_STREAMS:
                text = f"{HEALTH_STREAMS} streams of the health service are open"
                await self._refuse(method, context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            self._streams[HEALTH] += 1
            try:
                await handler.unary_stream(request, context)
            finally:
                self._streams[HEALTH] -= 1

        return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)

    async def _serve(self, method: str, serve: Any, request: Any, context: Any) -> Any:
        await self._admit_request(method, request, context)
        try:
            return await serve(request, context)
        except aio.InternalError:
            # The client disconnected during a write: no peer is left to answer.
            log.debug("%s: the client has disconnected", method)
        except aio.BaseError:
            raise
        except Exception:
            log.exception("%s failed", method)
            answer = _answer_type(method)
            if answer is None:
                await context.abort(grpc.StatusCode.INTERNAL, INNER)
            return answer(code=RecoverCode.ServerInnerError, info=INNER)

    async def _serve_stream(self, method: str, serve: Any, request: Any, context: Any) -> Any:
        """Each open stream holds memory for what its reader has not read."""
        job = job_of(request)
        # Those who watch a job must not keep its manager from its subscriptions.
        watches = method in READING or method in OPERATOR_METHODS
        whose = f"{WATCHED}{job}" if watches else job
        if self._streams[whose] >= MAX_STREAMS:
            text = f"job {job!r} has {MAX_STREAMS} open streams: close one first"
            if watches:
                text = f"{MAX_STREAMS} others watch job {job!r}: close one of them first"
            await self._refuse(method, context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._streams[whose] += 1
        serving = asyncio.ensure_future(self._serve(method, serve, request, context))
        try:
            while not serving.done():
                await asyncio.wait({serving}, timeout=REVOKED_S)
                if not serving.done() and not self._may_go_on(method, job, context):
                    text = "the token or certificate of this stream is not valid any more"
                    await self._refuse(method, context, grpc.StatusCode.UNAUTHENTICATED, text)
            return serving.result()
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            self._streams[whose] -= 1
            if not self._streams[whose]:
                del self._streams[whose]

    def _may_go_on(self, method: str, job: str, context: Any) -> bool:
        """Whether the caller of an open stream would still be admitted."""
        caller = self._caller(context)
        if caller is None or (method in OPERATOR_METHODS and not caller.operator):
            return False
        return method in OPEN_METHODS or caller.may(job)

    async def _admit_caller(self, method: str, context: Any) -> None:
        """Before anything of the request is read."""
        caller = self._caller(context)
        if caller is not None and (caller.operator or method not in OPERATOR_METHODS):
            return
        self.refused.note(context.peer())
        if not self._unknown_callers.take(host_of(context)):
            await self._refuse(method, context, *TOO_MANY)
        if caller is None:
            text = "no valid token or client certificate"
            await self._refuse(method, context, grpc.StatusCode.UNAUTHENTICATED, text)
        text = f"only the operator may call {method}"
        await self._refuse(method, context, grpc.StatusCode.PERMISSION_DENIED, text)

    def _reader(self, context: Any) -> str:
        """Who waits for whom: a tenant for itself; operators for others on their machine."""
        caller = self._caller(context)
        return caller.scope if caller and not caller.operator else host_of(context)

    async def _charge(self, method: str, context: Any, size: int) -> None:
        """Before the request is parsed. The operator acts for many jobs."""
        caller = self._caller(context)
        if caller is None or caller.operator or size <= FREE_BYTES:
            return
        rate = self._callers_often if method in OFTEN else self._callers
        if not rate.take(caller.scope, size):
            await self._refuse(method, context, *TOO_MANY)

    async def _admit_request(self, method: str, request: Any, context: Any) -> None:
        job, caller = job_of(request), self._caller(context)
        size = request.ByteSize()
        allowed = caller is not None and (method in OPEN_METHODS or caller.may(job))
        # Only the job itself may use up its own rate.
        if allowed and self._is_served(job):
            if method in OFTEN:
                within = self._often.take(job, 1.0 + size / OFTEN_BYTES_PER_TOKEN)
            elif method in READING:
                within = self._reading.take(job, 1.0 + size / BYTES_PER_TOKEN)
            else:
                within = self._jobs.take(job, 1.0 + size / BYTES_PER_TOKEN)
        else:
            # Strangers of the same machine must not use up the rate of those with a token.
            host = host_of(context)
            whose = f"{caller.scope} at {host}" if caller is not None and allowed else host
            within = self._unknown_callers.take(whose, 1.0 + size / BYTES_PER_TOKEN)
        if not within:
            await self._refuse(method, context, *TOO_MANY)
        if not allowed:
            scope = caller.scope if caller is not None else "an unknown caller"
            text = f"{scope} may not use job {job!r}"
            await self._refuse(method, context, grpc.StatusCode.PERMISSION_DENIED, text)

    def _caller(self, context: Any) -> Caller | None:
        sent = dict(context.invocation_metadata() or ())
        return self._authority.caller(sent, context.auth_context())

    async def _refuse(self, method: str, context: Any, status: grpc.StatusCode, why: str) -> None:
        limited = status is grpc.StatusCode.RESOURCE_EXHAUSTED
        if not limited and self._logged.take(host_of(context)):
            log.warning("refused %s to %s: %s", method, context.peer(), why[:MAX_LOGGED])
        await context.abort(status, why[:MAX_LOGGED])


def job_of(request: Any) -> str:
    """The job that a request names; messages spell the field differently."""
    for name in ("jobId", "jobID", "job"):
        job = getattr(request, name, None)
        if isinstance(job, str):
            return job
    return ""


def _answer_type(method: str) -> Any:
    """The type of the method's answer if it has a code and a text for failures."""
    service, _, name = method.removeprefix("/").rpartition("/")
    module = ANSWERS.get(service)
    if module is None:
        return None
    described = module.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]
    answer = described.methods_by_name[name].output_type
    fields = {field.name for field in answer.fields}
    return getattr(module, answer.name) if {"code", "info"} <= fields else None
