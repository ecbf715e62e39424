"""The manager's connection to clusterd: Init, Register, the stream of signals, reports in order.

Every call has a deadline. The stream is opened again whenever it breaks or becomes silent; clusterd
then repeats the signals that have no answer yet. A report is kept until clusterd has taken it,
however long clusterd is away. What the answer means for the job is decided by the next signal, not
here.
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

from taskd.clusterd.records.journal_records import PastRound
from taskd.manager.clusterd_link.clusterd_channel import ClusterdChannel
from taskd.manager.settings import ManagerConfig
from taskd.model.clusterd import FaultReport, Report, Signal
from taskd.model.codes import NOT_STORED, RecoverCode
from taskd.model.faults import Fault, FaultKind
from taskd.model.ids import Rank
from taskd.model.operations import Reply
from taskd.model.profiling import KEYS, Part, parts_of
from taskd.runtime.retry import Tries, doubling
from taskd.wire import recover_codec as codec
from taskd.wire._pb import control_pb2 as control
from taskd.wire._pb import profiling_pb2 as profiling
from taskd.wire._pb import recover_pb2 as pb

log = logging.getLogger(__name__)

ROLE = "taskd"
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.05, 1.0
UNKNOWN_JOB = {RecoverCode.UnRegistry, RecoverCode.UnInit, RecoverCode.JobNotExist}
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
BUSY = {RecoverCode.RateLimited, RecoverCode.SignalQueueBusy, RecoverCode.EventQueueBusy}
NOT_SAID = {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED}
UNIMPLEMENTED_S = 60.0
"""The pause before a call is tried again that the server does not implement."""


class ClusterdClient:
    """The connection of one job. `listen` and `deliver` run as long as the manager does."""

    def __init__(self, address: str, config: ManagerConfig) -> None:
        self._config = config
        self._channels = [ClusterdChannel(one, config) for one in address.split(",")]
        self._channel = self._channels[0]
        self._who = pb.ClientInfo(jobId=config.job_id, role=ROLE)
        self._random = Random()
        self._reports: deque[Report | Reply] = deque()
        self._reported = asyncio.Event()
        self.declaration: control.JobDeclaration | None = None
        """Sent before Init, for a clusterd that has no cluster to read the job from."""
        self.joined = 0
        """How often: after a restart clusterd knows neither progress nor status of the job."""
        self._problem = ""

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    def _use_next(self) -> None:
        """Of several clusterds that share an etcd, only the one that leads listens."""
        self._channels.append(self._channels.pop(0))
        self._channel = self._channels[0]

    def _tries(self) -> Tries:
        return Tries(doubling(FIRST_BACKOFF_S, MAX_BACKOFF_S, self._random))

    # Signals

    async def listen(self, take: Callable[[Signal], None], subscribed: Callable[[], None]) -> None:
        """Pass on every signal. Runs forever."""
        tries = self._tries()
        async for _ in tries:
            try:
                if await self._join():
                    subscribed()
                    tries.reset()
                    await self._follow_signals(take)
            except aio.AioRpcError as error:
                log.warning("clusterd: %s: %s", error.code().name, error.details())
                self._channel.renew()
            except TimeoutError:
                log.warning("clusterd: no signal for %g s, reconnecting", self._config.silence_s)
            self._use_next()

    async def _join(self) -> bool:
        if self.declaration is not None:
            await self._declare(self.declaration)
        for name in ("Init", "Register"):
            status = await self._call(getattr(self._channel.recover, name), self._who)
            if status.code != RecoverCode.OK:
                log.warning("clusterd: %s: code=%d: %s", name, status.code, status.info)
                return False
        self.joined += 1
        return True

    async def _declare(self, declaration: control.JobDeclaration) -> None:
        try:
            answer = await self._call(self._channel.control.DeclareJob, declaration)
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            log.info("clusterd: accepts no job declarations: it reads the job from its cluster")
            self.declaration = None
            return
        if answer.code != RecoverCode.OK:
            log.warning("clusterd: DeclareJob: code=%d: %s", answer.code, answer.info)

    async def _follow_signals(self, take: Callable[[Signal], None]) -> None:
        stream = self._channel.recover.SubscribeProcessManageSignal(
            self._who, metadata=self._channel.metadata()
        )
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._config.silence_s) as patience:
                async for message in stream:
                    patience.reschedule(loop.time() + self._config.silence_s)
                    if not message.jobId or message.jobId == self._config.job_id:
                        take(codec.signal_of(message))
        finally:
            stream.cancel()

    async def follow_switch(self, take: Callable[[Part, str], None]) -> None:
        """Pass on the profiling switch whenever it changes. Runs forever."""
        who = profiling.ProfilingClientInfo(jobId=self._config.job_id, role=ROLE)

        def received(message: Any) -> None:
            switch = message.profilingSwitch
            take(parts_of({key: getattr(switch, key) for key in KEYS}), "clusterd")

        await self._follow_stream(
            lambda: self._channel.trace.SubscribeDataTraceSwitch, who, received
        )

    async def follow_orders(self, name: str, take: Callable[[Any], None]) -> None:
        """Pass on the operations that clusterd requests on this stream. Runs forever."""
        await self._follow_stream(lambda: getattr(self._channel.recover, name), self._who, take)

    async def _follow_stream(
        self, method: Callable[[], Any], who: Any, take: Callable[[Any], None]
    ) -> None:
        tries = self._tries()
        async for _ in tries:
            try:
                async for message in method()(who, metadata=self._channel.metadata()):
                    tries.reset()
                    take(message)
            except aio.AioRpcError as error:
                log.debug("clusterd: stream: %s: %s", error.code().name, error.details())
                self._channel.renew()
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    tries.pause_next(UNIMPLEMENTED_S)

    async def request_stress_test(self, ops: Sequence[int]) -> tuple[int, str]:
        """Request a stress test of all nodes, as an operator would. Returns (code, info)."""
        request = codec.stress_request(self._config.job_id, ops)
        answer = await self._call(self._channel.recover.StressTest, request)
        return answer.code, answer.info

    # Reports

    def report(self, report: Report | Reply) -> None:
        """Queue a report; `deliver` sends the reports in order."""
        self._reports.append(report)
        self._reported.set()

    async def deliver(self) -> None:
        while True:
            await self._reported.wait()
            self._reported.clear()
            while self._reports:
                await self._deliver_retrying(self._reports.popleft())

    async def _deliver_retrying(self, report: Report | Reply) -> None:
        async for _ in self._tries():
            try:
                if await self._deliver(report):
                    return
            except aio.AioRpcError as error:
                log.warning("clusterd: %s: %s", type(report).__name__, error.details())
                self._channel.renew()
            if self._is_outdated(report):
                log.info("clusterd: %s dropped: a newer one exists", type(report).__name__)
                return

    def _is_outdated(self, report: Report | Reply) -> bool:
        """A fault report contains all known faults: only the newest one must be retried."""
        return isinstance(report, FaultReport) and any(
            isinstance(other, FaultReport) for other in self._reports
        )

    async def _deliver(self, report: Report | Reply) -> bool:
        """True: clusterd has answered, with success or an error that a retry cannot change."""
        name, request = codec.report_request(self._config.job_id, report)
        status = await self._call(getattr(self._channel.recover, name), request)
        if status.code == RecoverCode.OK:
            return True
        log.warning("clusterd: %s: code=%d: %s", type(report).__name__, status.code, status.info)
        if status.code in UNKNOWN_JOB:
            await self._join()
            return False
        return status.code not in BUSY and not status.info.startswith(NOT_STORED)

    # Status

    async def past_rounds(self) -> list[PastRound] | None:
        """The last rounds that have ended, under all managers. None: try again."""
        request = control.JobRequest(job=self._config.job_id)
        try:
            status = await self._call(self._channel.control.Status, request)
        except aio.AioRpcError as error:
            return [] if error.code() in NOT_SAID else None
        return [
            PastRound(
                incident=one.incident,
                began=one.began_unix_ms / 1000,
                took_s=one.took_ms / 1000,
                strategy=one.strategy,
                outcome=one.outcome,
                faults=tuple(
                    Fault(Rank(fault.rank), FaultKind(fault.fault_type), fault.evidence)
                    for fault in one.faults
                ),
            )
            for one in status.rounds
        ]

    async def publish(self, progress: control.JobProgress) -> bool | None:
        """Whether clusterd has it now. None: this clusterd does not accept progress."""
        try:
            answer = await self._call(self._channel.control.PublishProgress, progress)
        except aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            if error.code() in REFUSED:
                self._say(f"{error.code().name}: {error.details()}")
            return False
        if answer.code not in (RecoverCode.OK, *UNKNOWN_JOB):
            self._say(f"code={answer.code}: {answer.info}")
        return bool(answer.code == RecoverCode.OK)

    def _say(self, problem: str) -> None:
        if problem != self._problem:  # once: progress is published every second
            self._problem = problem
            log.warning("clusterd: PublishProgress: %s", problem)

    async def report_sub_health(self, slow: Iterable[control.Straggler]) -> bool:
        """Report all stragglers. False: not delivered, try again."""
        report = control.SubHealth(job=self._config.job_id, stragglers=slow)
        try:
            answer = await self._call(self._channel.control.ReportSubHealth, report)
        except aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return bool(answer.code == RecoverCode.OK)

    async def report_incident(self, report: control.IncidentReport) -> bool:
        """Report a closed incident. False: not delivered, try again."""
        try:
            answer = await self._call(self._channel.control.ReportIncident, report)
        except aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
        return answer.code not in BUSY

    async def end_job(self, exit_code: int, because: str) -> None:
        end = control.JobEnd(job=self._config.job_id, exit_code=exit_code, because=because)
        try:
            await self._call(self._channel.control.EndJob, end)
        except aio.AioRpcError as error:
            log.info("clusterd: EndJob not delivered: %s", error.details())

    async def _call(self, method: Any, request: Any) -> Any:
        return await method(
            request, timeout=self._config.rpc_timeout_s, metadata=self._channel.metadata()
        )
