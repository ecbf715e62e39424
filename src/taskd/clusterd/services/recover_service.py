"""The Recover service: each method turns its request into an event for the job's owner.

Names, codes and texts are Ascend's. Two differences: a subscription lasts as long as the job, and a
report is answered when its decision is on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import grpc

from taskd.clusterd.job_owner import Answer, JobOwner
from taskd.clusterd.job_registry import JobRegistry
from taskd.clusterd.listeners import SUBSCRIBED, Channel, End
from taskd.clusterd.services.level_streams import abort
from taskd.core.clusterd.states import Pausing, Resuming, StressTesting, SwitchingNic
from taskd.model.clusterd import (
    Event,
    Operation,
    Pod,
    ReplyOperator,
    SendStressRanks,
    SendSwitchRanks,
    Signal,
    SignalDelivered,
    SignalFailed,
    Stream,
    Subscribed,
    Unsubscribed,
)
from taskd.model.codes import RecoverCode
from taskd.model.ids import JobId
from taskd.wire import recover_codec as codec
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.recover_pb2_grpc import RecoverServicer

T = TypeVar("T", Signal, SendSwitchRanks, SendStressRanks)

KEEP_ALIVE_S = 4.0
REPLY_S = 15 * 60.0
OPERATING = Pausing | SwitchingNic | StressTesting | Resuming
WHY = {
    End.TAKEN_OVER: (grpc.StatusCode.ABORTED, "another client has subscribed to this job"),
    End.TOO_SLOW: (grpc.StatusCode.RESOURCE_EXHAUSTED, "the client reads its signals too slowly"),
    End.OVER: (grpc.StatusCode.UNAVAILABLE, "the job or the server has ended"),
}


class RecoverService(RecoverServicer):
    def __init__(self, jobs: JobRegistry) -> None:
        self._jobs = jobs

    async def Init(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        return _status(await self._jobs.init(JobId(request.jobId)))

    async def Register(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        return _status(await self._jobs.register(JobId(request.jobId)))

    async def HealthCheck(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        return _status(Answer.of(RecoverCode.OK))

    # Reports

    async def ReportProcessFault(self, request: pb.ProcessFaultRequest, context: Any) -> pb.Status:
        def event() -> Event:
            report = codec.fault_report(request)
            self._jobs.views.faults_reported(JobId(request.jobId), report.faults)
            return report

        return await self._report(request.jobId, event)

    async def ReportStopComplete(self, request: pb.StopCompleteRequest, context: Any) -> pb.Status:
        return await self._report(request.jobId, lambda: codec.stop_report(request))

    async def ReportRecoverStrategy(
        self, request: pb.RecoverStrategyRequest, context: Any
    ) -> pb.Status:
        return await self._report(request.jobId, lambda: codec.strategies_report(request))

    async def ReportRecoverStatus(
        self, request: pb.RecoverStatusRequest, context: Any
    ) -> pb.Status:
        return await self._report(request.jobId, lambda: codec.result_report(request))

    async def ReplySwitchNicResult(self, request: pb.SwitchResult, context: Any) -> pb.Status:
        return await self._report(request.jobId, lambda: codec.nic_result(request))

    async def ReplyStressTestResult(self, request: pb.StressTestResult, context: Any) -> pb.Status:
        return await self._report(request.jobId, lambda: codec.stress_result(request))

    async def _report(self, job: str, event: Callable[[], Event]) -> pb.Status:
        owner = self._jobs.get(job)
        if owner is None:
            return _status(Answer.of(RecoverCode.UnRegistry))
        if owner.signals.full:
            return _status(Answer.of(RecoverCode.SignalQueueBusy))
        try:
            return _status(await owner.ask(event()))
        except codec.InvalidRequest as problem:
            return _status(Answer.of(RecoverCode.InvalidReqParam, str(problem)))

    # Operations

    async def SwitchNicTrack(self, request: pb.SwitchNics, context: Any) -> pb.Status:
        return await self._operate(request.jobID, codec.nic_asked, request)

    async def StressTest(self, request: pb.StressTestParam, context: Any) -> pb.Status:
        return await self._operate(request.jobID, codec.stress_asked, request)

    async def _operate(
        self, job: str, read: Callable[[Any, Iterable[Pod]], Event], request: Any
    ) -> pb.Status:
        owner, facts = self._jobs.get(job), self._jobs.facts(JobId(job))
        if owner is None or facts is None:
            return _status(Answer.of(RecoverCode.OMParamInvalid, "the job is not registered here"))
        try:
            event = read(request, facts.pods)
        except codec.InvalidRequest as problem:
            return _status(Answer.of(RecoverCode.OMParamInvalid, str(problem)))
        return _status(await owner.ask(event))

    async def SubscribeSwitchNicSignal(self, request: pb.SwitchNicRequest, context: Any) -> None:
        text = await self._reply(request.jobID, Operation.NIC, context)
        await context.write(pb.SwitchNicResponse(jobID=request.jobID, msg=text))

    async def SubscribeStressTestResponse(
        self, request: pb.StressTestRequest, context: Any
    ) -> None:
        text = await self._reply(request.jobID, Operation.STRESS, context)
        await context.write(pb.StressTestResponse(jobID=request.jobID, msg=text))

    async def _reply(self, job: str, operation: Operation, context: Any) -> str:
        """The result of the operation: at once if it is known and unread, otherwise when it is."""
        owner = await self._owner(job, context)
        if operation in owner.unread:
            return owner.unread.pop(operation).text
        state = owner.state
        if not isinstance(state, OPERATING) or state.task.operation != operation:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"no {operation} is running for job {job!r}"
            )
        channel = owner.replies[operation]
        listener = channel.open()
        try:
            item = await listener.next(REPLY_S)
        finally:
            channel.close(listener)
        match item:
            case ReplyOperator(text=text):
                owner.unread.pop(operation, None)
                return text
            case End():
                return await abort(context, *WHY[item])
            case None:
                return await abort(
                    context,
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"the {operation} gave no result in time",
                )

    # Streams to the job

    async def SubscribeProcessManageSignal(self, request: pb.ClientInfo, context: Any) -> None:
        owner = await self._owner(request.jobId, context)

        def keep_alive() -> pb.ProcessManageSignal:
            round_ = getattr(owner.state, "round", None)
            return codec.keep_alive(
                owner.job, round_.uuid if round_ else "", owner.state.job.incident
            )

        def encode(order: Signal) -> pb.ProcessManageSignal:
            return codec.signal_message(owner.job, order)

        await _serve(owner, owner.signals, Stream.SIGNALS, context, encode, keep_alive)

    async def SubscribeNotifySwitch(self, request: pb.ClientInfo, context: Any) -> None:
        owner = await self._owner(request.jobId, context)

        def encode(order: SendSwitchRanks) -> pb.SwitchRankList:
            return codec.switch_message(owner.job, order)

        await _serve(owner, owner.nic, Stream.NIC, context, encode)

    async def SubscribeNotifyExecStressTest(self, request: pb.ClientInfo, context: Any) -> None:
        owner = await self._owner(request.jobId, context)

        def encode(order: SendStressRanks) -> pb.StressTestRankParams:
            return codec.stress_message(owner.job, order)

        await _serve(owner, owner.stress, Stream.STRESS, context, encode)

    async def _owner(self, job: str, context: Any) -> JobOwner:
        owner = self._jobs.get(job)
        if owner is None:
            return await abort(context, grpc.StatusCode.NOT_FOUND, RecoverCode.UnRegistry.sentence)
        return owner


async def _serve(
    owner: JobOwner,
    channel: Channel[T],
    stream: Stream,
    context: Any,
    encode: Callable[[T], Any],
    keep_alive: Callable[[], Any] | None = None,
) -> None:
    """Forward the channel's items until the client disconnects; post what was delivered."""
    listener = channel.open()
    owner.post(Subscribed(stream))
    sending: T | None = None
    try:
        await context.send_initial_metadata(SUBSCRIBED)
        while True:
            item = await listener.next(KEEP_ALIVE_S)
            if isinstance(item, End):
                await context.abort(*WHY[item])
            elif item is not None:
                sending = item
                await context.write(encode(item))
                sending = None
                owner.post(SignalDelivered(item.sequence))
            elif keep_alive is not None:
                await context.write(keep_alive())
    finally:
        if sending is not None:
            owner.post(SignalFailed(sending.sequence))
        if channel.close(listener):
            owner.post(Unsubscribed(stream))


def _status(answer: Answer) -> pb.Status:
    return pb.Status(code=answer.code, info=answer.info)
