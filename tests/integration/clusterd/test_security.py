"""Authorization: tokens and certificates give access to one job, to all, or to none."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc import aio

from taskd.bus.security import Tls
from taskd.clusterd.auth import Authority, TokenFile, Tokens
from taskd.clusterd.interceptors import AdmissionInterceptor
from taskd.clusterd.main import ServerConfig
from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic
from taskd.runtime.tokens import OPERATOR, bearer, job_scope, token_for
from taskd.wire._pb import (
    config_pb2,
    control_pb2,
    fault_pb2,
    job_pb2,
    profiling_pb2,
    pubfault_pb2,
)
from taskd.wire._pb import recover_pb2 as pb
from taskd.wire._pb.recover_pb2_grpc import RecoverServicer, add_RecoverServicer_to_server
from tests.integration.clusterd.client import METHODS, WAIT_S, Client, connected, started

SECRET = "a long secret"
TRACE, NAMED = "/TrainingDataTrace", "default/a"
A, B = token_for(SECRET, job_scope("a")), token_for(SECRET, job_scope("b"))
BOSS = token_for(SECRET, OPERATOR)
DENIED, UNKNOWN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED


async def refused(client: Client, method: str, request: Any) -> grpc.StatusCode | None:
    """The status with which a call was refused; None if it was accepted."""
    call = client.method(method)(request, timeout=WAIT_S, metadata=client.metadata)
    try:
        if isinstance(call, aio.UnaryStreamCall):
            # A subscription is confirmed at once, long before the first item.
            first = asyncio.ensure_future(call.read())
            confirmed = asyncio.ensure_future(call.initial_metadata())
            await asyncio.wait([first, confirmed], return_when=asyncio.FIRST_COMPLETED)
            if await confirmed:
                call.cancel()
            await asyncio.gather(first, return_exceptions=True)
            call.cancel()
            code = await call.code()
            return code if code in (DENIED, UNKNOWN) else None
        await call
    except aio.AioRpcError as error:
        return error.code() if error.code() in (DENIED, UNKNOWN) else None
    return None


def of_job(job: str) -> list[tuple[str, Any]]:
    """Every method that a job's own token may call, as a call about this job."""
    info = pb.ClientInfo(jobId=job)
    return [
        ("/Recover/Init", info),
        ("/Recover/Register", info),
        ("/Recover/HealthCheck", info),
        ("/Recover/SubscribeProcessManageSignal", info),
        ("/Recover/SubscribeNotifySwitch", info),
        ("/Recover/SubscribeNotifyExecStressTest", info),
        ("/Recover/ReportProcessFault", pb.ProcessFaultRequest(jobId=job)),
        ("/Recover/ReportStopComplete", pb.StopCompleteRequest(jobId=job)),
        ("/Recover/ReportRecoverStrategy", pb.RecoverStrategyRequest(jobId=job)),
        ("/Recover/ReportRecoverStatus", pb.RecoverStatusRequest(jobId=job)),
        ("/Recover/ReplySwitchNicResult", pb.SwitchResult(jobId=job)),
        ("/Recover/ReplyStressTestResult", pb.StressTestResult(jobId=job)),
        (
            "/TrainingDataTrace/SubscribeDataTraceSwitch",
            profiling_pb2.ProfilingClientInfo(jobId=job),
        ),
        ("/taskd.v1.Control/DeclareJob", control_pb2.JobDeclaration(job=job)),
        ("/taskd.v1.Control/Status", control_pb2.JobRequest(job=job)),
        ("/taskd.v1.Control/Watch", control_pb2.JobRequest(job=job)),
        ("/taskd.v1.Control/Replay", control_pb2.ReplayRequest(job=job)),
        ("/taskd.v1.Control/ReportFault", control_pb2.FaultReport(job=job)),
        ("/taskd.v1.Control/PublishProgress", control_pb2.JobProgress(job=job)),
        ("/taskd.v1.Control/ReportSubHealth", control_pb2.SubHealth(job=job)),
        ("/taskd.v1.Control/ReportIncident", control_pb2.IncidentReport(job=job)),
        ("/fault.Fault/Register", fault_pb2.ClientInfo(jobId=job, role="me")),
        ("/fault.Fault/SubscribeFaultMsgSignal", fault_pb2.ClientInfo(jobId=job, role="me")),
        ("/fault.Fault/GetFaultMsgSignal", fault_pb2.ClientInfo(jobId=job)),
        ("/config.Config/Register", config_pb2.ClientInfo(jobId=job)),
        ("/config.Config/SubscribeRankTable", config_pb2.ClientInfo(jobId=job)),
        ("/taskd.v1.Control/EndJob", control_pb2.JobEnd(job=job)),
    ]


def of_operator(job: str) -> list[tuple[str, Any]]:
    return [
        ("/PubFault/SendPublicFault", pubfault_pb2.PublicFaultRequest()),
        ("/fault.Fault/GetFaultMsgSignal", fault_pb2.ClientInfo()),
        ("/fault.Fault/Register", fault_pb2.ClientInfo(jobId="-1", role="me")),
        ("/job.Job/Register", job_pb2.ClientInfo(role="CCAgent")),
        ("/job.Job/SubscribeJobSummarySignal", job_pb2.ClientInfo(role="CCAgent")),
        ("/job.Job/SubscribeJobSummarySignalList", job_pb2.ClientInfo(role="CCAgent")),
        ("/taskd.v1.Control/RecordAction", control_pb2.OperatorAction(job=job)),
        ("/Recover/SwitchNicTrack", pb.SwitchNics(jobID=job)),
        ("/Recover/StressTest", pb.StressTestParam(jobID=job)),
        ("/Recover/SubscribeSwitchNicSignal", pb.SwitchNicRequest(jobID=job)),
        ("/Recover/SubscribeStressTestResponse", pb.StressTestRequest(jobID=job)),
        (
            "/TrainingDataTrace/ModifyTrainingDataTraceSwitch",
            profiling_pb2.DataTypeReq(jobNsName=NAMED),
        ),
        (
            "/TrainingDataTrace/GetTrainingDataTraceSwitch",
            profiling_pb2.DataStatusReq(jobNsName=NAMED),
        ),
    ]


def test_every_method_is_for_a_job_or_for_the_operator() -> None:
    named = {method for method, _ in of_job("a") + of_operator("a")}
    assert named == set(METHODS) - {"/taskd.v1.Control/Jobs"}


def test_job_token_gives_access_to_that_job_only(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        config = ServerConfig(tokens=Tokens({}, SECRET))
        async with (
            started(config, job="b", token=B) as (server, client_b),
            connected(server.address, A, "a") as client_a,
        ):
            await client_b.join()
            for method, request in of_job("b"):
                assert await refused(client_a, method, request) is DENIED, method
            for method, request in of_operator("a"):
                assert await refused(client_a, method, request) is DENIED, method
            for method, request in of_job("a"):
                assert await refused(client_a, method, request) is None, method
            async with connected(server.address, "", "b") as stranger:
                for method, request in of_job("b") + of_operator("b"):
                    assert await refused(stranger, method, request) is UNKNOWN, method
            async with connected(server.address, BOSS, "b") as boss:
                for method, request in of_job("c") + of_operator("b"):
                    assert await refused(boss, method, request) is None, method

    asyncio.run(main())
    refusals = [line for line in caplog.messages if "127.0.0.1" in line and "refused" in line]
    assert "job:a may not use job 'b'" in refusals[0]
    assert len(refusals) < 20, "refusals are logged, but not without limit"


def test_a_job_sees_itself_in_the_list_and_the_operator_sees_all() -> None:
    async def main() -> None:
        config = ServerConfig(tokens=Tokens({}, SECRET))
        async with started(config, job="a", token=A) as (server, client_a):
            await client_a.join()
            async with connected(server.address, B, "b") as client_b:
                await client_b.join()
                listed = await client_b.call("Jobs", control_pb2.JobsRequest())
                assert [line.job for line in listed.jobs] == ["b"]
            async with connected(server.address, BOSS) as boss:
                listed = await boss.call("Jobs", control_pb2.JobsRequest())
                assert [line.job for line in listed.jobs] == ["a", "b"]

    asyncio.run(main())


@pytest.mark.parametrize("token", [A[:-1], A + "x", BOSS.replace(OPERATOR, "job:a"), "job:a.", "é"])
def test_invalid_token_gives_no_access(token: str) -> None:
    assert Tokens({}, SECRET).scope_of(token) is None


def test_world_readable_token_file_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text("operator boss\n")
    file.chmod(0o600)
    Tokens.load(file)
    assert not caplog.messages
    file.chmod(0o644)
    Tokens.load(file)
    (warning,) = caplog.messages
    assert str(file) in warning
    assert "chmod" in warning


def test_tokens_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# ours\noperator boss\njob:a  key-a # of a\njob:c x#long  #comment\n")
    tokens = Tokens.load(file)
    assert (tokens.scope_of("boss"), tokens.scope_of("key-a")) == (OPERATOR, "job:a")
    assert (tokens.scope_of("x#long"), tokens.scope_of("x")) == ("job:c", None)
    assert tokens.scope_of("key-b") is None
    file.write_text("operator\n")
    with pytest.raises(SettingsError, match="tokens:1"):
        Tokens.load(file)
    file.write_text("\n")
    with pytest.raises(SettingsError, match="no token"):
        Tokens.load(file)


def test_unknown_caller_cannot_use_up_a_jobs_rate() -> None:
    async def main() -> None:
        config = ServerConfig(tokens=Tokens({}, SECRET))
        async with started(config, job="a", token=A) as (server, client):
            await client.join()
            async with connected(server.address, "wrong", "a") as stranger:
                for _ in range(450):
                    code = await refused(stranger, "/Recover/HealthCheck", pb.ClientInfo(jobId="a"))
                    assert code is UNKNOWN
            assert await client.fault(1) == 0

    asyncio.run(main())


# Certificates


class Issuer:
    """A certificate authority for one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca")])
        self.ca = self._file("ca.crt", self._sign("ca", self.key.public_key(), ca=True))

    def issue(self, name: str) -> tuple[str, str]:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        stem = name.replace(":", "-")
        return (
            self._file(f"{stem}.key", pem),
            self._file(f"{stem}.crt", self._sign(name, key.public_key())),
        )

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *, ca: bool = False) -> bytes:
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)

    def _file(self, name: str, content: bytes) -> str:
        path = self.directory / name
        path.write_bytes(content)
        return str(path)


def channel(port: int, ca: str, pair: tuple[str, str] | None = None) -> aio.Channel:
    files = [Path(path).read_bytes() for path in pair] if pair else [None, None]
    credentials = grpc.ssl_channel_credentials(Path(ca).read_bytes(), *files)
    return aio.secure_channel(f"localhost:{port}", credentials)


def test_client_certificate_has_the_scope_of_its_common_name(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    key, crt = issuer.issue("clusterd")
    config = ServerConfig(tls=Tls(ca=issuer.ca, server_key=key, server_crt=crt))

    async def main() -> None:
        async with started(config) as (server, plain):
            with pytest.raises(aio.AioRpcError):
                await plain.code("HealthCheck")
            async with channel(server.port, issuer.ca, issuer.issue("job:a")) as a:
                client = Client(a, job="a")
                await client.join()
                for method, request in of_job("b") + of_operator("a"):
                    assert await refused(client, method, request) is DENIED, method
            async with channel(server.port, issuer.ca, issuer.issue("operator")) as boss:
                assert (
                    await refused(Client(boss), "/Recover/StressTest", pb.StressTestParam()) is None
                )
            async with channel(server.port, issuer.ca, issuer.issue("somebody")) as other:
                assert (
                    await refused(Client(other), "/Recover/Init", pb.ClientInfo(jobId="a"))
                    is UNKNOWN
                )
            async with channel(server.port, issuer.ca) as none:
                with pytest.raises(aio.AioRpcError):
                    await Client(none).code("HealthCheck")

    asyncio.run(main())


def test_tls_of_the_server_alone_with_tokens(tmp_path: Path) -> None:
    issuer = Issuer(tmp_path)
    key, crt = issuer.issue("clusterd")
    tls = Tls(ca="", server_key=key, server_crt=crt)
    config = ServerConfig(tls=tls, tokens=Tokens({}, SECRET))

    async def main() -> None:
        async with started(config) as (server, _), channel(server.port, issuer.ca) as link:
            await Client(link, A, "a").join()
            assert await refused(Client(link, "", "a"), "/Recover/Init", pb.ClientInfo()) is UNKNOWN

    asyncio.run(main())


def test_missing_files_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        tls = Tls(ca="", server_key=str(tmp_path / "no.key"), server_crt=str(tmp_path / "no.crt"))
        with pytest.raises(SettingsError, match=r"no\.key"):
            async with started(ServerConfig(tls=tls)):
                pass

    asyncio.run(main())


def test_occupied_port_is_reported(tmp_path: Path) -> None:
    async def main() -> None:
        async with started() as (server, _):
            for listen, why in (
                (server.address, "Address already in use"),
                ("127.0.0.1:99999", "expected host:port"),
                ("nohost.invalid:0", "not known|resolution"),
            ):
                with pytest.raises(SettingsError, match=why):
                    async with started(ServerConfig(listen=listen)):
                        pass

    asyncio.run(main())


# Internal errors


class Broken(RecoverServicer):
    async def HealthCheck(self, request: pb.ClientInfo, context: Any) -> pb.Status:
        raise RuntimeError("a bug")

    async def SubscribeNotifySwitch(self, request: pb.ClientInfo, context: Any) -> None:
        raise RuntimeError("a bug")


def test_internal_error_is_answered_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        guard = AdmissionInterceptor(Authority(), lambda _: False, monotonic)
        server = aio.server(interceptors=[guard])
        add: Any = add_RecoverServicer_to_server
        add(Broken(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with connected(f"127.0.0.1:{port}") as client:
            for _ in range(3):
                assert await client.code("HealthCheck") == 599
            with pytest.raises(aio.AioRpcError) as failed:
                await client.recover.SubscribeNotifySwitch(pb.ClientInfo()).read()
            assert failed.value.code() is grpc.StatusCode.INTERNAL
        await server.stop(None)

    asyncio.run(main())
    assert "a bug" in caplog.text
    assert "/Recover/HealthCheck" in caplog.text


def test_token_file_that_is_no_text_is_not_used(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text("operator boss\n")
    tokens = TokenFile(file)
    file.write_bytes(b"operator \xff\n")
    assert tokens.scope_of("boss") == "operator"
    file.write_text("operator other\n")
    assert (tokens.scope_of("boss"), tokens.scope_of("other")) == (None, "operator")


def test_stream_of_a_revoked_token_ends(tmp_path: Path) -> None:
    """It would show the job, and take its signals, as long as it is open."""
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text("operator boss\njob:a old\njob:a other\n")

    async def main() -> None:
        config = ServerConfig(tokens=TokenFile(file))
        async with started(config, job="a", token="other") as (server, client):
            await client.join()
            async with connected(server.address, "old", "a") as former:
                streams = []
                for one in (former, client):
                    watch = one.control.Watch(
                        control_pb2.JobRequest(job="a"), metadata=bearer(one.token)
                    )
                    assert isinstance(await watch.read(), control_pb2.JobStatus)
                    streams.append(watch)
                file.write_text("operator boss\njob:a other\n")
                async with asyncio.timeout(WAIT_S):
                    assert await streams[0].code() is grpc.StatusCode.UNAUTHENTICATED
                assert not streams[1].done()
                streams[1].cancel()

    asyncio.run(main())
