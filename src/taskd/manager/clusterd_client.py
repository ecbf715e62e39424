"""The manager's line to clusterd: Init, Register, the stream of signals; reports, in order.

Everything has a deadline. The stream is opened anew whenever it breaks or falls silent; clusterd
then says again what is still to be answered. A report is tried until it is answered; what the
answer means for the job is not decided here but by the next signal.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import grpc
from grpc import aio

from taskd.bus.clusterd_tls import credentials
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import Report, Signal
from taskd.model.codes import RecoverCode
from taskd.model.operations import Reply
from taskd.model.profiling import KEYS, Part, parts_of
from taskd.runtime.retry import Tries, doubling
from taskd.runtime.tokens import bearer
from taskd.wire import recover_codec as codec
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import profiling_pb2 as profiling
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

log = logging.getLogger(__name__)

ROLE = "taskd"
OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
)
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
UNKNOWN_JOB = {RecoverCode.UnRegistry, RecoverCode.UnInit, RecoverCode.JobNotExist}
BUSY = {RecoverCode.RateLimited, RecoverCode.SignalQueueBusy, RecoverCode.EventQueueBusy}
MAX_TRIES = 20
UNIMPLEMENTED_S = 60.0
"""How long to leave a server alone that does not know a call."""

_RECOVER: Any = RecoverStub
_CONTROL: Any = ControlStub
_TRACE: Any = TrainingDataTraceStub


class ClusterdClient:
    """One job's line. `listen` and `deliver` run for as long as the manager does."""

    def __init__(self, address: str, config: ManagerConfig) -> None:
        self._config = config
        encrypted = credentials(config.clusterd_tls)
        self._channel = (
            aio.insecure_channel(address, options=OPTIONS)
            if encrypted is None
            else aio.secure_channel(address, encrypted, options=OPTIONS)
        )
        self._recover = _RECOVER(self._channel)
        self._control = _CONTROL(self._channel)
        self._trace = _TRACE(self._channel)
        self._who = pb.ClientInfo(jobId=config.job_id, role=ROLE)
        self._metadata = bearer(config.clusterd_token)
        self._random = Random()
        self._reports: deque[Report | Reply] = deque()
        self._reported = asyncio.Event()
        self.declaration: control.JobDeclaration | None = None
        """Said before Init to a clusterd that has no cluster to read it from."""

    async def close(self) -> None:
        await self._channel.close(None)

    def _tries(self, at_most: int | None = None) -> Tries:
        return Tries(doubling(FIRST_BACKOFF_S, MAX_BACKOFF_S, self._random), at_most=at_most)

    # Signals

    async def listen(self, take: Callable[[Signal], None], subscribed: Callable[[], None]) -> None:
        """Hand over every signal, for ever."""
        tries = self._tries()
        async for _ in tries:
            try:
                if await self._join():
                    subscribed()
                    tries.reset()
                    await self._follow(take)
            except aio.AioRpcError as error:
                log.warning("clusterd: %s: %s", error.code().name, error.details())
            except TimeoutError:
                log.warning("clusterd has been silent for %g s", self._config.silence_s)

    async def _join(self) -> bool:
        if self.declaration is not None:
            await self._declare(self.declaration)
        for name in ("Init", "Register"):
            status = await self._call(getattr(self._recover, name), self._who)
            if status.code != RecoverCode.OK:
                log.warning("clusterd answered %s with %d: %s", name, status.code, status.info)
                return False
        return True

    async def _declare(self, declaration: control.JobDeclaration) -> None:
        try:
            answer = await self._call(self._control.DeclareJob, declaration)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            log.info("this clusterd takes no declarations: its cluster describes the job")
            self.declaration = None
            return
        if answer.code != RecoverCode.OK:
            log.warning("the declaration was answered with %d: %s", answer.code, answer.info)

    async def _follow(self, take: Callable[[Signal], None]) -> None:
        stream = self._recover.SubscribeProcessManageSignal(self._who, metadata=self._metadata)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.silence_s) as patience:
                async for told in stream:
                    patience.reschedule(loop.time() + self._config.silence_s)
                    if not told.jobId or told.jobId == self._config.job_id:
                        take(codec.signal_of(told))
        finally:
            stream.cancel()

    async def follow_switch(self, take: Callable[[Part, str], None]) -> None:
        """Hand over the switch of profiling whenever it changes, for ever."""
        who = profiling.ProfilingClientInfo(jobId=self._config.job_id, role=ROLE)
        tries = self._tries()
        async for _ in tries:
            try:
                stream = self._trace.SubscribeDataTraceSwitch(who, metadata=self._metadata)
                async for told in stream:
                    tries.reset()
                    switch = told.profilingSwitch
                    take(parts_of({key: getattr(switch, key) for key in KEYS}), "clusterd")
            except aio.AioRpcError as error:
                log.debug("the switch of profiling: %s: %s", error.code().name, error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    tries.pause_next(UNIMPLEMENTED_S)

    async def follow_orders(self, name: str, take: Callable[[Any], None]) -> None:
        """Hand over the operations that clusterd asks for on this stream, for ever."""
        tries = self._tries()
        async for _ in tries:
            try:
                stream = getattr(self._recover, name)(self._who, metadata=self._metadata)
                async for told in stream:
                    tries.reset()
                    take(told)
            except aio.AioRpcError as error:
                log.debug("%s: %s: %s", name, error.code().name, error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    tries.pause_next(UNIMPLEMENTED_S)

    async def ask_stress(self, ops: Sequence[int]) -> tuple[int, str]:
        """Ask for a stress test of all nodes, as an operator would; (code, info)."""
        request = codec.stress_request(self._config.job_id, ops)
        answer = await self._call(self._recover.StressTest, request)
        return answer.code, answer.info

    # Reports

    def report(self, report: Report | Reply) -> None:
        """Taken over now, delivered in order."""
        self._reports.append(report)
        self._reported.set()

    async def deliver(self) -> None:
        while True:
            await self._reported.wait()
            self._reported.clear()
            while self._reports:
                await self._insist(self._reports.popleft())

    async def _insist(self, report: Report | Reply) -> None:
        async for _ in self._tries(MAX_TRIES):
            try:
                if await self._deliver(report):
                    return
            except aio.AioRpcError as error:
                log.warning("%s: %s", type(report).__name__, error.details())
            if self._is_overtaken(report):
                log.info("%s is overtaken by a newer one", type(report).__name__)
                return
        log.error("%s could not be delivered", type(report).__name__)

    def _is_overtaken(self, report: Report | Reply) -> bool:
        """A fault report says all that is known; only the newest is worth insisting on."""
        return any(type(other) is type(report) for other in self._reports)

    async def _deliver(self, report: Report | Reply) -> bool:
        """True: answered, for good or ill."""
        name, request = codec.report_request(self._config.job_id, report)
        status = await self._call(getattr(self._recover, name), request)
        if status.code == RecoverCode.OK:
            return True
        log.warning("%s: answered %d: %s", type(report).__name__, status.code, status.info)
        if status.code in UNKNOWN_JOB:
            await self._join()
            return False
        return status.code not in BUSY

    # For people

    async def publish(self, progress: control.JobProgress) -> bool:
        """False: this clusterd does not want to know."""
        try:
            await self._call(self._control.PublishProgress, progress)
        except aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNIMPLEMENTED
        return True

    async def report_sub_health(self, slow: Iterable[control.Straggler]) -> bool:
        """All ranks that hold the others up. False: not told, to be tried again."""
        told = control.SubHealth(job=self._config.job_id, stragglers=slow)
        try:
            answer = await self._call(self._control.ReportSubHealth, told)
        except aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return bool(answer.code == RecoverCode.OK)

    async def end_job(self, exit_code: int, because: str) -> None:
        end = control.JobEnd(job=self._config.job_id, exit_code=exit_code, because=because)
        try:
            await self._call(self._control.EndJob, end)
        except aio.AioRpcError as error:
            log.info("clusterd was not told that the job has ended: %s", error.details())

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(request, timeout=self._config.rpc_timeout_s, metadata=self._metadata)
