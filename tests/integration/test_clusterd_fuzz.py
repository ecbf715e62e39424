"""Every method with anything at all, in any order: no crash, no 599, no job that stays stuck."""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from math import inf
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskd.clusterd.limits import Rate
from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.core.recovery.states import Ended, Idle, Shrunk
from taskd.wire._pb import control_pb2, profiling_pb2, recover_pb2
from tests.integration.clusterd_client import Client, connected

JOB = "the job"
WORDS = [
    *("", "0", "1", "3", "7", "-1", "99999999", "9" * 40, "x", "½", "\uff11", " 2 ", "\x00"),
    *("retry", "recover", "recover-in-place", "downgrade", "upgrade", "dump", "exit", "continue"),
    *("migration", "on", "off", "host0", "host1", "default/fuzz", "a/b/c", "job", "2"),
]
NUMBERS = [0, 1, 2, -1, 201, 404, 405, 406, 407, 499, 2**31 - 1, -(2**31)]
SERVICES = [
    (recover_pb2, "Recover"),
    (profiling_pb2, "TrainingDataTrace"),
    (control_pb2, "Control"),
]
METHODS = [
    (method.name, method.input_type, method.server_streaming)
    for module, service in SERVICES
    for method in module.DESCRIPTOR.services_by_name[service].methods
    if method.name != "EndJob"
]
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.sampled_from(WORDS) | st.text(max_size=20),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.sampled_from(NUMBERS),
    FieldDescriptor.TYPE_INT64: st.sampled_from(NUMBERS),
    FieldDescriptor.TYPE_DOUBLE: st.floats(width=32),
}
LENGTHS = st.integers(0, 3)
FACTORS = st.sampled_from([1] * 9 + [6_000])


@st.composite
def message(draw: st.DrawFn, described: Descriptor) -> Message:
    """With some fields there and some not."""
    made = GetMessageClass(described)()
    for item in described.fields:
        if item.name in ("jobId", "jobID", "job"):
            setattr(made, item.name, draw(st.sampled_from([JOB, JOB, JOB, "another", ""])))
        elif draw(st.booleans()):
            _fill(draw, made, item)
    return made


def _fill(draw: st.DrawFn, made: Message, item: FieldDescriptor) -> None:
    repeated = item.is_repeated
    if item.type != FieldDescriptor.TYPE_MESSAGE:
        value = draw(SCALARS[item.type])
        if repeated:
            getattr(made, item.name).extend([value] * draw(LENGTHS))
        else:
            setattr(made, item.name, value)
        return
    inner: Any = item.message_type
    if inner.GetOptions().map_entry:
        kind = inner.fields_by_name["value"].message_type
        for key in draw(st.lists(st.sampled_from(WORDS), max_size=3)):
            getattr(made, item.name)[key].CopyFrom(draw(message(kind)))
    elif repeated:
        one = draw(message(inner))
        getattr(made, item.name).extend([one] * draw(LENGTHS))
    else:
        getattr(made, item.name).CopyFrom(draw(message(inner)))


Call = tuple[str, Message, bool, int]


@st.composite
def call(draw: st.DrawFn) -> Call:
    """Method, request, whether it streams, and how many times over each of its lists is sent."""
    name, described, streaming = draw(st.sampled_from(METHODS))
    return name, draw(message(described)), streaming, draw(FACTORS)


numbers = count()


class Fuzzed:
    """One server for all examples; each example has a job of its own."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server, self.client = server, client

    async def run(self, calls: list[Call]) -> None:
        self.client.job = f"job{next(numbers)}"
        assert await self.client.declare("retry", "recover-in-place", "dump", nodes=2) == 0
        await self.client.join()
        open_streams = []
        for name, request, streaming, factor in calls:
            stream = await self._send(name, _for(request, self.client.job, factor), streaming)
            if stream is not None:
                open_streams.append(stream)
        assert await self.client.code("HealthCheck") == 0
        owner = self.server.jobs.get(self.client.job)
        assert owner is not None
        at_rest = isinstance(owner.state, Idle | Shrunk | Ended)
        assert at_rest or owner.state.deadline < inf, f"stuck in {owner.state}"
        await self._ends()
        for stream in open_streams:
            stream.cancel()

    async def _send(self, name: str, request: Message, streaming: bool) -> Any:
        stubs = (self.client.recover, self.client.trace, self.client.control)
        method = next(getattr(stub, name) for stub in stubs if hasattr(stub, name))
        if streaming:
            stream = method(request)
            first = asyncio.ensure_future(stream.read())
            await asyncio.wait([first], timeout=0.005)
            first.cancel()
            return stream
        sent = method(request, timeout=20)
        code = await sent.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), f"{name}: {code}"
        if code is grpc.StatusCode.OK:
            answer = await sent
            assert getattr(answer, "code", 0) != 599, f"{name}: {answer}"
        return None

    async def _ends(self) -> None:
        """A well-behaved client can always bring the job to rest."""
        async with connected(self.server.address, job=self.client.job) as client:
            await client.join()
            signals = client.subscribe()
            await client.fault(1)
            owner = self.server.jobs.get(client.job)
            assert owner is not None
            for _ in range(30):
                if isinstance(owner.state, Idle | Ended):
                    return
                told = await signals.next()
                match told.signalType:
                    case "stopTrain":
                        await client.stopped(told.uuid)
                    case "globalFault":
                        await client.offer("retry", "recover", "dump", "exit", uuid=told.uuid)
                    case "changeStrategy":
                        await client.result(told.changeStrategy, uuid=told.uuid)
                    case "saveAndExit":
                        await client.result("dump", uuid=told.uuid)
                    case _:
                        pass
            raise AssertionError(f"no end in {owner.state}")


def _for(request: Message, job: str, factor: int) -> Message:
    sent = type(request)()
    sent.CopyFrom(request)
    for name in ("jobId", "jobID", "job"):
        if getattr(sent, name, "") == JOB:
            setattr(sent, name, job)
    for item in sent.DESCRIPTOR.fields:
        listed = getattr(sent, item.name)
        if item.is_repeated and hasattr(listed, "extend"):
            listed.extend(list(listed) * (factor - 1))
    return sent


def test_anything_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    plenty = Rate(1e9, 1e9)
    config = ServerConfig(job_rate=plenty, stranger_rate=plenty)
    with asyncio.Runner() as runner:

        @settings(
            max_examples=150,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(call(), min_size=1, max_size=16))
        def fuzz(calls: list[Call]) -> None:
            runner.run(fuzzed.run(calls))
            ours = [record for record in caplog.records if record.name.startswith("taskd")]
            assert not ours, caplog.text

        async def open_all() -> tuple[Any, Any, Fuzzed]:
            serving = serve(config)
            server = await serving.__aenter__()
            connecting = connected(server.address)
            return serving, connecting, Fuzzed(server, await connecting.__aenter__())

        serving, connecting, fuzzed = runner.run(open_all())
        try:
            fuzz()
        finally:
            runner.run(connecting.__aexit__(None, None, None))
            runner.run(serving.__aexit__(None, None, None))


def test_bytes_that_are_no_message_at_all() -> None:
    async def main() -> None:
        async with serve(ServerConfig()) as server, connected(server.address) as client:
            for module, service in SERVICES:
                described = module.DESCRIPTOR.services_by_name[service]
                for method in described.methods:
                    raw = client.channel.unary_unary(
                        f"/{described.full_name}/{method.name}",
                        request_serializer=None,
                        response_deserializer=None,
                    )
                    with pytest.raises(aio.AioRpcError):
                        await raw(b"\xff\xff\xff\xff", timeout=20)
            assert await client.code("HealthCheck") == 0

    asyncio.run(main())
