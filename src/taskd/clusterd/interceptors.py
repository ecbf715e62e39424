"""Runs before every method: authorization, rate limits, and an answer if the method fails.

An internal error is answered (599, or INTERNAL if the method has no code), logged with its
traceback, and ends only this call. This is the server's only broad `except`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from taskd.clusterd.auth import Authority
from taskd.model.codes import RecoverCode
from taskd.runtime.clock import Clock
from taskd.wire._pb import control_pb2, recover_pb2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rate:
    per_second: float
    burst: float


class Buckets:
    """Token buckets by key. The least recently used one is dropped, which grants one burst."""

    def __init__(self, rate: Rate, keys: int, clock: Clock) -> None:
        self._rate, self._keys, self._clock = rate, keys, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str, cost: float = 1.0) -> bool:
        """Whether another call is within the rate. A costly call may leave a negative balance."""
        now = self._clock()
        left, since = self._left.pop(key, (self._rate.burst, now))
        left = min(self._rate.burst, left + (now - since) * self._rate.per_second)
        allowed = left >= 1.0
        self._left[key] = (left - cost if allowed else left, now)
        if len(self._left) > self._keys:
            self._left.popitem(last=False)
        return allowed


OPERATOR_METHODS = {
    "/Recover/SwitchNicTrack",
    "/Recover/SubscribeSwitchNicSignal",
    "/Recover/StressTest",
    "/Recover/SubscribeStressTestResponse",
    "/TrainingDataTrace/ModifyTrainingDataTraceSwitch",
    "/TrainingDataTrace/GetTrainingDataTraceSwitch",
}
OPEN_METHODS = {"/taskd.v1.Control/Jobs"}
"""They show each caller only its own jobs."""
HEALTH = "/grpc.health.v1.Health/"
OFTEN = {"/Recover/HealthCheck", "/taskd.v1.Control/PublishProgress"}
"""Limited separately, so that they never use up the rate that reports need."""
INNER = RecoverCode.ServerInnerError.sentence

JOB_RATE, OFTEN_RATE, UNKNOWN_CALLER_RATE = Rate(100, 400), Rate(20, 100), Rate(2_000, 6_000)
LOG_RATE = Rate(0.1, 10)
"""Of refusals, for each machine: a caller that retries forever must not fill the disk."""
BYTES_PER_TOKEN = 4096
"""A large request counts as many small ones."""
KEYS = 20_000


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
        self._unknown_callers = Buckets(unknown_caller_rate, KEYS, clock)
        self._logged = Buckets(LOG_RATE, KEYS, clock)
        self._guarded: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        method = details.method
        if method in self._guarded:
            return self._guarded[method]
        handler = await continuation(details)
        if handler is None or method.startswith(HEALTH):
            return handler
        if handler.response_streaming:
            guarded = grpc.unary_stream_rpc_method_handler(
                self._streaming(method, handler.unary_stream),
                handler.request_deserializer,
                handler.response_serializer,
            )
        else:
            guarded = grpc.unary_unary_rpc_method_handler(
                self._single(method, handler.unary_unary),
                handler.request_deserializer,
                handler.response_serializer,
            )
        self._guarded[method] = guarded
        return guarded

    def _single(self, method: str, serve: Any) -> Any:
        async def guarded(request: Any, context: Any) -> Any:
            await self._admit(method, request, context)
            try:
                return await serve(request, context)
            except aio.BaseError:
                raise
            except Exception:
                log.exception("%s failed", method)
                answer = _answer_type(method)
                if answer is None:
                    await context.abort(grpc.StatusCode.INTERNAL, INNER)
                return answer(code=RecoverCode.ServerInnerError, info=INNER)

        return guarded

    def _streaming(self, method: str, serve: Any) -> Any:
        async def guarded(request: Any, context: Any) -> None:
            await self._admit(method, request, context)
            try:
                await serve(request, context)
            except aio.InternalError:
                # The client disconnected during a write: no peer is left to answer.
                log.debug("%s: the client has disconnected", method)
            except aio.BaseError:
                raise
            except Exception:
                log.exception("%s failed", method)
                await context.abort(grpc.StatusCode.INTERNAL, INNER)

        return guarded

    async def _admit(self, method: str, request: Any, context: Any) -> None:
        cost = 1.0 + request.ByteSize() / BYTES_PER_TOKEN
        refusal = self._refusal(method, job_of(request), cost, context)
        if refusal is not None:
            status, text = refusal
            if status is not grpc.StatusCode.RESOURCE_EXHAUSTED and self._logged.take(
                _host(context)
            ):
                log.warning("refused %s to %s: %s", method, context.peer(), text)
            await context.abort(status, text)

    def _refusal(
        self, method: str, job: str, cost: float, context: Any
    ) -> tuple[grpc.StatusCode, str] | None:
        sent = dict(context.invocation_metadata() or ())
        caller = self._authority.caller(sent, context.auth_context())
        allowed = caller is not None and (method in OPEN_METHODS or caller.may(job))
        # Only the job itself may use up its own rate.
        if allowed and self._is_served(job):
            within = self._often.take(job) if method in OFTEN else self._jobs.take(job, cost)
        else:
            within = self._unknown_callers.take(_host(context), cost)
        if not within:
            return grpc.StatusCode.RESOURCE_EXHAUSTED, RecoverCode.RateLimited.sentence
        if caller is None:
            return grpc.StatusCode.UNAUTHENTICATED, "no valid token or client certificate"
        if not caller.operator and method in OPERATOR_METHODS:
            return grpc.StatusCode.PERMISSION_DENIED, f"only the operator may call {method}"
        if not allowed:
            return grpc.StatusCode.PERMISSION_DENIED, f"{caller.scope} may not use job {job!r}"
        return None


def job_of(request: Any) -> str:
    """The job that a request names; messages spell the field differently."""
    for name in ("jobId", "jobID", "job"):
        job = getattr(request, name, None)
        if isinstance(job, str):
            return job
    return ""


def _host(context: Any) -> str:
    """The peer without its port, so that one machine counts as one caller."""
    return str(context.peer()).rpartition(":")[0]


def _answer_type(method: str) -> Any:
    """The type of the method's answer if it has a code for failures."""
    service, _, name = method.removeprefix("/").rpartition("/")
    module = recover_pb2 if service == "Recover" else control_pb2
    described = module.DESCRIPTOR.services_by_name.get(service.rpartition(".")[2])
    if described is None:
        return None
    answer = described.methods_by_name[name].output_type.name
    return {"Status": recover_pb2.Status, "Answer": control_pb2.Answer}.get(answer)
