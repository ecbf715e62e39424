"""What one tenant, with its own token or on an open server, cannot do to the others."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from taskd.bus.security import Tls
from taskd.clusterd.auth import Tokens
from taskd.clusterd.interceptors import HEALTH_STREAMS, MAX_STREAMS, SMALL_BYTES
from taskd.clusterd.main import ServerConfig, weaknesses
from taskd.commands.connection import plain
from taskd.model.codes import RecoverCode, TraceCode
from taskd.runtime.limits.rate_limit import Rate
from taskd.runtime.plain_text import OneLineFormatter, is_plain, one_line
from taskd.runtime.tokens import bearer
from taskd.wire._pb import control_pb2, profiling_pb2
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.clusterd.client import WAIT_S, Client, connected, started

FAST = Rate(1e6, 1e6)
ESCAPES = "\x1b[2J\x1b]0;title\x07\n2026-01-01 INFO forged \u202e line"


def test_requests_of_strangers_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty sub-messages cost two bytes each on the wire, and much more once they are parsed."""
    parsed: list[int] = []
    declaration: Any = control_pb2.JobDeclaration
    original = declaration.FromString

    def parse(raw: bytes) -> Any:
        parsed.append(len(raw))
        return original(raw)

    monkeypatch.setattr(declaration, "FromString", parse)

    async def main() -> None:
        config = ServerConfig(tokens=Tokens({"boss": "operator", "a": "job:a"}))
        async with started(config) as (server, client):
            flood = b"\x32\x00" * 1_900_000
            declare = client.channel.unary_unary("/taskd.v1.Control/DeclareJob", None, None)
            for metadata, status in (
                ((), grpc.StatusCode.UNAUTHENTICATED),
                ((("authorization", "Bearer boss"),), grpc.StatusCode.RESOURCE_EXHAUSTED),
            ):
                with pytest.raises(aio.AioRpcError) as refused:
                    await declare(flood, metadata=metadata, timeout=WAIT_S)
                assert refused.value.code() is status
            assert not parsed
            async with connected(server.address, "a", "a") as tenant:
                assert await tenant.declare() == 0
            assert parsed

    asyncio.run(main())


def test_large_requests_of_a_tenant_are_counted_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They name no job, so that no job's rate is used up."""
    parsed: list[int] = []
    declaration: Any = control_pb2.JobDeclaration
    original = declaration.FromString

    def parse(raw: bytes) -> Any:
        parsed.append(len(raw))
        return original(raw)

    monkeypatch.setattr(declaration, "FromString", parse)

    async def main() -> None:
        config = ServerConfig(tokens=Tokens({"a": "job:a", "b": "job:b"}))
        async with started(config) as (server, client):
            large = control_pb2.JobDeclaration(name="x" * 1_900_000).SerializeToString()
            declare = client.channel.unary_unary("/taskd.v1.Control/DeclareJob", None, None)
            statuses = set()
            for _ in range(20):
                with pytest.raises(aio.AioRpcError) as refused:
                    await declare(large, metadata=bearer("a"), timeout=WAIT_S)
                statuses.add(refused.value.code())
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in statuses
            assert len(parsed) < 20
            async with connected(server.address, "b", "b") as other:
                assert await other.declare() == 0

    asyncio.run(main())


def test_health_service_is_limited_for_strangers() -> None:
    async def main() -> None:
        config = ServerConfig(tokens=Tokens({"a": "job:a"}), health=True)
        async with started(config) as (server, client):
            check = client.channel.unary_unary("/grpc.health.v1.Health/Check", None, None)
            assert await check(b"", timeout=WAIT_S) == b"\x08\x01"  # SERVING
            assert await check(b"\xff" * 10, timeout=WAIT_S) == b"\x08\x01"  # it is not read
            own = (("grpc.use_local_subchannel_pool", 1),)
            async with aio.insecure_channel(server.address, options=own) as second:
                watches = [
                    channel.unary_stream("/grpc.health.v1.Health/Watch", None, None)
                    for channel in (client.channel, second)  # each may have a hundred calls
                ]
                calls = [watches[n % 2](b"") for n in range(HEALTH_STREAMS)]
                for call in calls:
                    assert await call.read() == b"\x08\x01"
                with pytest.raises(aio.AioRpcError) as refused:
                    await watches[0](b"").read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_small_methods_accept_small_requests_only() -> None:
    async def main() -> None:
        async with started(ServerConfig(unknown_caller_rate=FAST)) as (_server, client):
            with pytest.raises(aio.AioRpcError) as refused:
                await client.call("Init", pb.ClientInfo(jobId="x" * (SMALL_BYTES + 1)))
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(aio.AioRpcError) as refused:
                await client.channel.unary_unary("/Recover/Init", None, None)(
                    b"\xff\xff", timeout=WAIT_S
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(main())


def test_number_of_streams_of_a_job_is_limited() -> None:
    async def main() -> None:
        async with started(ServerConfig(job_rate=FAST)) as (_server, client):
            await client.join()
            watch = client.control.Watch
            calls = [watch(control_pb2.JobRequest(job="job")) for _ in range(MAX_STREAMS)]
            for call in calls:
                assert isinstance(await call.read(), control_pb2.JobStatus)
            with pytest.raises(aio.AioRpcError) as refused:
                await watch(control_pb2.JobRequest(job="job")).read()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            # Those who watch a job do not keep its manager from its orders.
            signals = await client.subscribe()
            assert await client.fault(1) == 0
            assert (await signals.next()).signalType
            for call in calls:
                call.cancel()

    asyncio.run(main())


def test_readers_do_not_use_up_the_rate_of_a_job() -> None:
    """Monitoring may ask far too often: the job's reports still arrive."""

    async def main() -> None:
        async with started(ServerConfig(job_rate=Rate(1e-6, 10))) as (_server, client):
            await client.join()
            codes: set[object] = set()
            for _ in range(20):
                try:
                    await client.call("Status", control_pb2.JobRequest(job="job"))
                except aio.AioRpcError as error:
                    codes.add(error.code())
            assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert await client.fault(1) == 0

    asyncio.run(main())


def test_large_progress_counts_as_many_small_ones() -> None:
    async def main() -> None:
        async with started() as (_server, client):
            await client.join()
            large = control_pb2.JobProgress(job="job", summary="x" * 1_500_000)
            codes: set[object] = set()
            for _ in range(20):
                try:
                    codes.add(await client.code("PublishProgress", large))
                except aio.AioRpcError as error:
                    codes.add(error.code())
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes

    asyncio.run(main())


def test_status_of_a_large_job_does_not_hold_up_its_reports() -> None:
    async def main() -> None:
        tokens = Tokens({"boss": "operator", "mine": "job:job"})
        async with (
            started(ServerConfig(tokens=tokens)) as (server, _),
            connected(server.address, "mine") as job,
        ):
            assert await job.declare("recover", per_node=2_000) == 0
            await job.join()
            large = control_pb2.JobProgress(job="job", summary="x" * 2_000_000)
            for _ in range(2):
                assert await job.code("PublishProgress", large) == 0
            assert await job.fault(*range(2_000)) == 0

    asyncio.run(main())


def test_declarations_without_a_client_make_room(tmp_path: Path) -> None:
    async def main() -> None:
        config = ServerConfig(max_jobs=5, journal=tmp_path / "journal", unknown_caller_rate=FAST)
        for attempt in range(2):
            async with started(config) as (_server, client):
                for number in range(12):
                    planted = Client(client.channel, job=f"planted-{attempt}-{number}")
                    assert await planted.declare() == 0
                    assert await planted.code("Init") == 0
                await Client(client.channel, job=f"real-{attempt}").join()
                listed = (await client.call("Jobs", control_pb2.JobsRequest())).jobs
                states = {line.job: line.state for line in listed}
                assert states[f"real-{attempt}"] == "Idle"
                assert list(states.values()).count("Declared") >= 3
                assert len(states) <= 6, "a job that was served before the restart counts, too"

    asyncio.run(main())


def test_switch_is_not_sent_to_another_job_of_the_same_name() -> None:
    async def main() -> None:
        async with started(ServerConfig(unknown_caller_rate=FAST)) as (_server, client):
            for job in ("victim", "thief"):
                declaration = control_pb2.JobDeclaration(job=job, name="train")
                assert await client.code("DeclareJob", declaration) == 0
            wanted = profiling_pb2.ProfilingSwitch(
                CommunicationOperator="on", Step="off", SaveCheckpoint="off", FP="off",
                DataLoader="off",
            )  # fmt: skip

            async def switch(name: str) -> Any:
                request = profiling_pb2.DataTypeReq(jobNsName=name, profilingSwitch=wanted)
                return await client.call("ModifyTrainingDataTraceSwitch", request)

            refused = await switch("default/train")
            assert refused.code == TraceCode.BadParameter
            assert "name one by its id, such as default/" in refused.message
            assert (await switch("default/victim")).code == TraceCode.OK
            for job, code in (("thief", TraceCode.NotFound), ("victim", TraceCode.OK)):
                request = profiling_pb2.DataStatusReq(jobNsName=f"default/{job}")
                found = await client.call("GetTrainingDataTraceSwitch", request)
                assert found.code == code

    asyncio.run(main())


def test_names_with_control_characters_are_refused() -> None:
    async def main() -> None:
        async with started(ServerConfig(unknown_caller_rate=FAST)) as (_server, client):
            bad = [
                control_pb2.JobDeclaration(job=ESCAPES),
                control_pb2.JobDeclaration(job="a", name=ESCAPES),
                control_pb2.JobDeclaration(job="a", namespace=ESCAPES),
                control_pb2.JobDeclaration(job="a", nodes=[control_pb2.Node(name=ESCAPES)]),
            ]
            for declaration in bad:
                assert await client.code("DeclareJob", declaration) == RecoverCode.InvalidReqParam
            assert (
                await client.code("Init", pb.ClientInfo(jobId=ESCAPES))
                == RecoverCode.InvalidReqParam
            )

    asyncio.run(main())


def test_text_of_tenants_is_plain_in_a_terminal_and_in_the_log() -> None:
    status = control_pb2.JobStatus(line=control_pb2.JobLine(because=ESCAPES), strategies=[ESCAPES])
    status.rounds.add(outcome=ESCAPES)
    shown = plain(status)
    texts = [shown.line.because, *shown.strategies, shown.rounds[0].outcome]
    assert all(map(is_plain, texts)), texts
    assert texts[0].startswith("\\x1b[2J")
    record = logging.LogRecord("n", logging.INFO, "p", 1, "job=%s", (ESCAPES,), None)
    assert is_plain(OneLineFormatter("%(message)s").format(record))
    assert one_line("grüße 你好") == "grüße 你好"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ServerConfig(listen="127.0.0.1:0"), []),
        (ServerConfig(listen="0.0.0.0:0"), ["clusterd is open", "clusterd has no TLS"]),
        (ServerConfig(listen="0.0.0.0:0", tokens=Tokens({})), ["no TLS: the traffic, with its"]),
        (ServerConfig(listen="[::]:0", tls=Tls(ca="x", server_key="")), []),
        (ServerConfig(listen="[::]:0", tls=Tls(ca="", server_key="")), ["clusterd is open"]),
    ],
)
def test_open_server_warns(config: ServerConfig, expected: list[str]) -> None:
    found = weaknesses(config)
    assert len(found) == len(expected)
    assert all(one in text for one, text in zip(expected, found, strict=True))


def test_readable_key_warns(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o640)
    tls = Tls(ca="x", server_key=str(key))
    assert "can be read by others" in weaknesses(ServerConfig(listen="[::]:0", tls=tls))[0]
