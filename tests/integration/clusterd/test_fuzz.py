"""Every method with random requests in any order: no crash, no 599, no stuck job."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, fields
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from taskd.clusterd.interceptors import limit_bytes
from taskd.clusterd.main import Server, ServerConfig, serve
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.states import Ended, HandedOver, Idle, Shrunk
from taskd.model.ids import JobId
from taskd.runtime.limits.rate_limit import Rate
from taskd.wire._pb import control_pb2, recover_pb2
from tests.integration.clusterd.client import METHODS as ALL_METHODS
from tests.integration.clusterd.client import Client, connected, eventually
from tests.integration.clusterd.objects import JOB as TRAIN
from tests.integration.clusterd.objects import Objects, joined

JOB, ANOTHER = "the job", "another"
WORDS = [
    *("", "0", "1", "3", "7", "-1", "99999999", "9" * 40, "x", "½", "\uff11", " 2 ", "\x00"),
    *("retry", "recover", "recover-in-place", "downgrade", "upgrade", "dump", "exit", "continue"),
    *(
        "migration",
        "on",
        "off",
        "host0",
        "host1",
        "default/fuzz",
        "a/b/c",
        "team/train",
        "job",
        "2",
    ),
    *("CCAE", "1.0", "message-1", "fault-0001", "220001001", "occur", "once", "NPU", "CCAgent"),
]
NUMBERS = [1_790_000_000_000, 0, 1, 2, -1, 201, 404, 405, 406, 407, 499, 2**31 - 1, -(2**31)]
METHODS = [
    (path, method.input_type, method.server_streaming) for path, method in ALL_METHODS.items()
]
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_STRING: st.sampled_from(WORDS) | st.text(max_size=20),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_INT32: st.sampled_from(NUMBERS[1:]),
    FieldDescriptor.TYPE_INT64: st.sampled_from(NUMBERS),
    FieldDescriptor.TYPE_DOUBLE: st.floats(width=32),
}
LENGTHS = st.integers(0, 3)
FACTORS = st.sampled_from([1] * 9 + [6_000])


@st.composite
def message(draw: st.DrawFn, described: Descriptor) -> Message:
    """With some fields set and some not."""
    made = GetMessageClass(described)()
    for item in described.fields:
        if item.name in ("jobId", "jobID", "job"):
            setattr(made, item.name, draw(st.sampled_from([JOB, JOB, JOB, ANOTHER, ""])))
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
        value = inner.fields_by_name["value"]
        for key in draw(st.lists(st.sampled_from(WORDS), max_size=3)):
            if value.message_type is None:
                getattr(made, item.name)[key] = draw(SCALARS[value.type])
            else:
                getattr(made, item.name)[key].CopyFrom(draw(message(value.message_type)))
    elif repeated:
        one = draw(message(inner))
        getattr(made, item.name).extend([one] * draw(LENGTHS))
    else:
        getattr(made, item.name).CopyFrom(draw(message(inner)))


Call = tuple[str, Message, bool, int]


@st.composite
def call(draw: st.DrawFn) -> Call:
    """Method, request, whether it streams, and how often each of its lists is repeated."""
    name, described, streaming = draw(st.sampled_from(METHODS))
    made = draw(message(described))
    if isinstance(made, control_pb2.JobEnd) and made.job == JOB:
        made.job = ANOTHER  # The rest of the example needs its job.
    return name, made, streaming, draw(FACTORS)


async def obey(client: Client, signal: recover_pb2.ProcessManageSignal) -> None:
    """As a well-behaved client does."""
    match signal.signalType:
        case "stopTrain":
            await client.stopped(signal.uuid)
        case "globalFault":
            await client.offer("retry", "recover", "dump", "exit", uuid=signal.uuid)
        case "changeStrategy":
            await client.result(signal.changeStrategy, uuid=signal.uuid)
        case "saveAndExit":
            await client.result("dump", uuid=signal.uuid)
        case _:
            pass


numbers = count()


class Fuzzed:
    """One server for all examples; each example has its own job."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server, self.client = server, client

    async def run(self, calls: list[Call]) -> None:
        self.client.job = f"job{next(numbers)}"
        assert await self.client.declare("retry", "recover-in-place", "dump", nodes=2) == 0
        await self.client.join()
        streams = [await self.send(made) for made in calls]
        assert await self.client.code("HealthCheck") == 0
        self.check()
        await self._ends()
        for stream in streams:
            if stream is not None:
                stream.cancel()

    def check(self) -> None:
        owner = self.server.jobs.get(self.client.job)
        assert owner is not None
        at_rest = isinstance(owner.state, Idle | Shrunk | Ended)
        assert at_rest or owner.state.deadline < inf, f"stuck in {owner.state}"

    async def send(self, made: Call) -> Any:
        """The stream, if it is one."""
        name, request, streaming, factor = made
        return await self._send(name, _for(request, self.client.job, factor), streaming)

    async def _send(self, name: str, request: Message, streaming: bool) -> Any:
        method = self.client.method(name)
        if streaming:
            stream = method(request)
            first = asyncio.ensure_future(stream.read())
            await asyncio.wait([first], timeout=0.005)
            first.cancel()
            return stream
        sent = method(request, timeout=20)
        code = await sent.code()
        if request.ByteSize() > limit_bytes(name):
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name}: {code}"
            return None
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND), f"{name}: {code}"
        if code is grpc.StatusCode.OK:
            answer = await sent
            assert getattr(answer, "code", 0) != 599, f"{name}: {answer}"
        return None

    async def _ends(self) -> None:
        """A well-behaved client can always end the round."""
        async with connected(self.server.address, job=self.client.job) as client:
            await client.join()
            signals = await client.subscribe()
            await client.fault(1)
            owner = self.server.jobs.get(client.job)
            assert owner is not None
            for _ in range(30):
                if isinstance(owner.state, Idle | Ended):
                    return
                await obey(client, await signals.next())
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


def test_random_requests_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    plenty = Rate(1e9, 1e9)
    config = ServerConfig(job_rate=plenty, unknown_caller_rate=plenty)
    with asyncio.Runner() as runner:

        @settings(
            max_examples=150,
            phases=(Phase.generate,),  # to shrink or explain a failure takes minutes
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


# The same with a cluster that changes at random, too

SHORT_S = 0.1
"""All timeouts of the recovery."""
WAITS = {item.name: SHORT_S for item in fields(RecoveryConfig) if item.name.endswith("_s")}
LEVELS = ["SubHealthFault", "RestartBusiness", "SeparateNPU", "NotHandleFault", "", "½"]
NODES = st.integers(0, 2)


@dataclass(frozen=True)
class Change:
    """What the user, the scheduler, the platform or a device does to the cluster."""

    what: str
    values: tuple[Any, ...]

    def apply(self, objects: Objects) -> None:
        match self.what, self.values:
            case "note", (name, word):
                objects.change_group(lambda b: b["metadata"]["annotations"].update({name: word}))
            case "label", (name, word):
                objects.change_group(lambda b: b["metadata"]["labels"].update({name: word}))
            case "phase", (word,):
                objects.change_group(lambda b: b["status"].update(phase=word))
            case "pod", (node, uid, backup):
                extra = {"podType": "backup"} if backup else {}
                objects.pod(node, uid, "spare" if backup else "", **extra)
            case "lost", (node,):
                pod = objects.directory / "pods" / f"team.train-{node}.yaml"
                pod.unlink(missing_ok=True)
            case "device", (node, level, code):
                objects.sub_health(node, level, code)
            case "reset", (data,):
                objects.reset_config(**data)
            case other:
                raise AssertionError(other)


def changes(what: str, *values: st.SearchStrategy[Any]) -> st.SearchStrategy[Change]:
    return st.builds(Change, st.just(what), st.tuples(*values))


PLATFORM_NOTES = [
    *("ProcessRecoverStrategy", "ProcessConfirmFault", "ProcessResultFault", "RankTableReady"),
    *("recover-strategy", "wait-reschedule-timeout"),
]
LABELS = ["process-recover-enable", "subHealthyStrategy", "fault-scheduling"]
NOTE_WORDS = [
    "retry",
    "recover",
    "dump",
    "exit",
    "",
    "true",
    "false",
    "3:1",
    "0:0,2:2",
    "x:½",
    "99",
]
LABEL_WORDS = ["on", "off", "pause", "hotSwitch", "graceExit", "ignore", "grace", ""]
CHANGE = st.one_of(
    changes("note", st.sampled_from(PLATFORM_NOTES), st.sampled_from(NOTE_WORDS)),
    changes("label", st.sampled_from(LABELS), st.sampled_from(LABEL_WORDS)),
    changes("phase", st.sampled_from(["Running", "Pending", "Inqueue", ""])),
    changes("pod", NODES, st.sampled_from(["", "new", "newer"]), st.booleans()),
    changes("lost", NODES),
    changes("device", NODES, st.sampled_from(LEVELS), st.sampled_from(["", "", "damaged"])),
    changes("reset", st.sampled_from([{}, {"RankList": [{"Policy": "reset"}]}, {"RankList": 7}])),
)
RANKS = st.builds(
    recover_pb2.FaultRank, rankId=st.sampled_from("123"), faultType=st.sampled_from("012")
)
OFFERED = ["retry", "recover", "downgrade", "dump", "migration", "exit"]
ORDERED = [*OFFERED, "upgrade", "continue"]
DONE = st.builds(recover_pb2.Status, code=st.sampled_from([0, 0, 0, 201, 404, 406, 499]))
SENSIBLE = {
    "/Recover/ReportProcessFault": st.builds(
        recover_pb2.ProcessFaultRequest, jobId=st.just(JOB), faultRanks=st.lists(RANKS, min_size=1)
    ),
    "/Recover/ReportStopComplete": st.builds(
        recover_pb2.StopCompleteRequest, jobId=st.just(JOB), status=DONE
    ),
    "/Recover/ReportRecoverStrategy": st.builds(
        recover_pb2.RecoverStrategyRequest, jobId=st.just(JOB), strategies=st.just(OFFERED)
    ),
    "/Recover/ReportRecoverStatus": st.builds(
        recover_pb2.RecoverStatusRequest,
        jobId=st.just(JOB),
        status=DONE,
        strategy=st.sampled_from(ORDERED),
    ),
}
"""Sequences that lead further into a round than chance does."""
REPORT = st.one_of(
    [st.tuples(st.just(name), made, st.just(False), st.just(1)) for name, made in SENSIBLE.items()]
)


@dataclass(frozen=True)
class Setting:
    """A cluster and the start of its example."""

    reaches: str
    notes: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    sub_healthy: bool = False


SETTINGS = {
    "plain": Setting("Stopping"),
    "platform": Setting("PlatformChoosing", notes={"ProcessRecoverStrategy": ""}),
    "hot switch": Setting(
        "AwaitingBackup", labels={"subHealthyStrategy": "hotSwitch"}, sub_healthy=True
    ),
}


async def something_new(server: Server) -> None:
    """The events are handled, or a deadline passes."""
    owner = server.jobs.served[JobId(TRAIN)]
    news = owner.changes()
    await asyncio.wait([asyncio.ensure_future(news.wait())], timeout=2 * SHORT_S)
    owner.unwatch(news)
    news.set()


async def fuzz_cluster(
    directory: Path, setting: Setting, steps: list[Call | Change | None], states: set[str]
) -> None:
    objects = Objects(directory)
    for node in range(2):
        objects.pod(node)
    objects.reset_config()
    objects.group(annotations=setting.notes, labels=setting.labels)
    if setting.sub_healthy:
        objects.sub_health(1)
    plenty = Rate(1e9, 1e9)
    config = ServerConfig(
        cluster_dir=directory,
        job_rate=plenty,
        unknown_caller_rate=plenty,
        recovery=RecoveryConfig(**WAITS),  # type: ignore[arg-type]
    )
    async with serve(config) as server, connected(server.address, job=TRAIN) as client:
        fuzzed = Fuzzed(server, client)
        signals = await joined(server, client, at_rest=not setting.sub_healthy)
        if not setting.sub_healthy:
            await client.fault(3)
        for taken in steps:
            if isinstance(taken, tuple):
                await fuzzed.send(taken)
            elif isinstance(taken, Change):
                taken.apply(objects)
                await client.code("HealthCheck")
            else:
                await something_new(server)
            fuzzed.check()
        await comes_to_rest(objects, server, client)
        signals.cancel()
        states.update(line.after for line in await client.history())


GOOD = {"good-0", "good-1"}


async def comes_to_rest(objects: Objects, server: Server, client: Client) -> None:
    """The round ends once user, scheduler, platform and client behave well."""
    for path in (objects.directory / "configmaps").glob("*deviceinfo*"):
        path.unlink()
    for name in ("spare", "train-2"):
        (objects.directory / "pods" / f"team.{name}.yaml").unlink(missing_ok=True)
    for node in range(2):
        objects.pod(node, uid=f"good-{node}")
    objects.reset_config()
    objects.group("recover,dump")
    owner = server.jobs.served[JobId(TRAIN)]
    await eventually(lambda: {p.uid for p in owner.state.job.pods} == GOOD, server, TRAIN)

    async def answer() -> None:
        signals = await client.subscribe()
        while True:
            await obey(client, await signals.next())

    async def schedule() -> None:
        while True:
            await eventually(lambda: isinstance(owner.state, HandedOver), server, TRAIN)
            Change("phase", ("Pending",)).apply(objects)
            await eventually(lambda: restarted("Pending"), server, TRAIN)
            Change("phase", ("Running",)).apply(objects)
            await eventually(lambda: restarted("Running"), server, TRAIN)

    def restarted(phase: str) -> bool:
        return owner.state.job.phase == phase or not isinstance(owner.state, HandedOver)

    await client.join()
    others = [asyncio.ensure_future(answer()), asyncio.ensure_future(schedule())]
    try:
        assert await client.fault(1) in (0, 506)
        await eventually(lambda: isinstance(owner.state, Idle), server, TRAIN)
    finally:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_random_requests_and_random_cluster_changes(
    name: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.ERROR)
    states: set[str] = set()
    with asyncio.Runner() as runner:

        @settings(
            max_examples=15,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate],  # A stuck example takes too long to shrink.
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(call() | CHANGE | REPORT | st.none(), min_size=8, max_size=32))
        def fuzz(steps: list[Call | Change | None]) -> None:
            place = tmp_path / str(next(numbers))
            runner.run(fuzz_cluster(place, SETTINGS[name], steps, states))
            ours = [record for record in caplog.records if record.name.startswith("taskd")]
            assert not ours, caplog.text

        fuzz()
    assert {SETTINGS[name].reaches, "Stopping", "Idle"} <= states


def test_random_bytes_are_refused() -> None:
    async def main() -> None:
        async with serve(ServerConfig()) as server, connected(server.address) as client:
            for path in ALL_METHODS:
                raw = client.channel.unary_unary(
                    path, request_serializer=None, response_deserializer=None
                )
                with pytest.raises(aio.AioRpcError):
                    await raw(b"\xff\xff\xff\xff", timeout=20)
            assert await client.code("HealthCheck") == 0

    asyncio.run(main())
