"""A small client of clusterd for tests: records signals, sends the given reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.runtime.tokens import bearer
from taskd.wire._pb import (
    config_pb2,
    control_pb2,
    fault_pb2,
    job_pb2,
    profiling_pb2,
    pubfault_pb2,
    recover_pb2,
)
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.control_pb2_grpc import ControlStub
from taskd.wire._pb.profiling_pb2_grpc import TrainingDataTraceStub
from taskd.wire._pb.recover_pb2_grpc import RecoverStub

WAIT_S = 20.0
SERVICES: list[tuple[Any, str]] = [
    (recover_pb2, "Recover"),
    (profiling_pb2, "TrainingDataTrace"),
    (control_pb2, "Control"),
    (pubfault_pb2, "PubFault"),
    (fault_pb2, "Fault"),
    (job_pb2, "Job"),
    (config_pb2, "Config"),
]
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module, name in SERVICES
    for service in [module.DESCRIPTOR.services_by_name[name]]
    for method in service.methods
}
"""All methods of clusterd, by their full names."""


@dataclass
class Client:
    channel: aio.Channel
    token: str = ""
    job: str = "job"
    heard: list[pb.ProcessManageSignal] = field(default_factory=list)

    def __post_init__(self) -> None:
        recover: Any = RecoverStub
        control: Any = ControlStub
        trace: Any = TrainingDataTraceStub
        self.recover, self.control = recover(self.channel), control(self.channel)
        self.trace = trace(self.channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return bearer(self.token)

    def method(self, path: str) -> Any:
        """A method by its full name: several services have one called Register."""
        described = METHODS[path]
        kind = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        return kind(
            path,
            request_serializer=GetMessageClass(described.input_type).SerializeToString,
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )

    async def call(self, method: str, request: Any = None) -> Any:
        """The method of Recover, Control or TrainingDataTrace."""
        request = pb.ClientInfo(jobId=self.job, role="taskd") if request is None else request
        stubs = (self.recover, self.control, self.trace)
        stub = next(stub for stub in stubs if hasattr(stub, method))
        return await getattr(stub, method)(request, timeout=WAIT_S, metadata=self.metadata)

    async def code(self, method: str, request: Any = None) -> int:
        return int((await self.call(method, request)).code)

    async def declare(self, *strategies: str, nodes: int = 1, per_node: int = 4) -> int:
        nodes_sent = [
            control_pb2.Node(
                node_rank=n, name=f"host{n}", ranks=range(n * per_node, (n + 1) * per_node)
            )
            for n in range(nodes)
        ]
        return await self.code(
            "DeclareJob",
            control_pb2.JobDeclaration(job=self.job, strategies=strategies, nodes=nodes_sent),
        )

    async def join(self) -> None:
        assert await self.code("Init") == 0
        assert await self.code("Register") == 0

    async def subscribe(self) -> Signals:
        """When clusterd knows of it: a signal that is sent before that is sent a second time."""
        request = pb.ClientInfo(jobId=self.job, role="taskd")
        call = self.recover.SubscribeProcessManageSignal(request, metadata=self.metadata)
        async with asyncio.timeout(WAIT_S):
            await call.initial_metadata()
        return Signals(call)

    async def fault(self, *ranks: int, kind: str = "1") -> int:
        faults = [pb.FaultRank(rankId=str(rank), faultType=kind) for rank in ranks]
        return await self.code(
            "ReportProcessFault", pb.ProcessFaultRequest(jobId=self.job, faultRanks=faults)
        )

    async def stopped(self, uuid: str = "", code: int = 0) -> int:
        return await self.code(
            "ReportStopComplete",
            pb.StopCompleteRequest(jobId=self.job, status=pb.Status(code=code), uuid=uuid),
        )

    async def offer(self, *strategies: str, uuid: str = "") -> int:
        return await self.code(
            "ReportRecoverStrategy",
            pb.RecoverStrategyRequest(jobId=self.job, strategies=strategies, uuid=uuid),
        )

    async def result(self, strategy: str, code: int = 0, uuid: str = "") -> int:
        return await self.code(
            "ReportRecoverStatus",
            pb.RecoverStatusRequest(
                jobId=self.job, status=pb.Status(code=code), strategy=strategy, uuid=uuid
            ),
        )

    async def status(self) -> control_pb2.JobStatus:
        status: control_pb2.JobStatus = await self.call(
            "Status", control_pb2.JobRequest(job=self.job)
        )
        return status

    async def history(self) -> list[control_pb2.HistoryLine]:
        call = self.control.Replay(
            control_pb2.ReplayRequest(job=self.job), metadata=self.metadata, timeout=WAIT_S
        )
        return [line async for line in call]


class Signals:
    def __init__(self, call: Any) -> None:
        self.call = call

    async def next(self, wanted: str | None = None) -> pb.ProcessManageSignal:
        """The next signal, or the next one of this type; skips keep-alives otherwise."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.call.read()
                assert isinstance(message, pb.ProcessManageSignal), "the stream has ended"
                if message.signalType == (wanted or message.signalType) and (
                    wanted is not None or message.signalType != "keep-alive"
                ):
                    signal: pb.ProcessManageSignal = message
                    return signal

    def cancel(self) -> None:
        self.call.cancel()


@asynccontextmanager
async def connected(address: str, token: str = "", job: str = "job") -> AsyncIterator[Client]:
    async with aio.insecure_channel(address) as channel:
        yield Client(channel, token, job)


@asynccontextmanager
async def started(
    config: ServerConfig | None = None, job: str = "job", token: str = ""
) -> AsyncIterator[tuple[Server, Client]]:
    async with (
        serve(config or ServerConfig()) as server,
        connected(server.address, token, job) as client,
    ):
        yield server, client


async def eventually(holds: Callable[[], bool], server: Server, job: str = "job") -> None:
    """Wait until the job meets a condition; checked whenever the job changes."""
    owner = server.jobs.get(job)
    assert owner is not None
    news = owner.changes()
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await news.wait()
            news.clear()
    owner.unwatch(news)


def switch(**values: str) -> profiling_pb2.ProfilingSwitch:
    return profiling_pb2.ProfilingSwitch(**values)
