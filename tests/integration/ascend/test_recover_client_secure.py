"""The Elastic Agent's recover client over TLS, and the check of the server's certificate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import NameOID

import mindx_elastic
import taskd
from mindx_elastic import recover_manager
from mindx_elastic.recover_manager import DLRecoverManager, pb
from taskd.ascend.documented.elastic_agent import to_wire
from taskd.ascend.recover_channel import common_name
from taskd.wire._pb import recover_pb2
from tests.integration.ascend.recover_server import Running
from tests.integration.certificates import Authority

NAME = "clusterd.example"
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a certificate. By default it is acceptable."""

    key: Any = None
    digest: Any = "SHA256"
    since: datetime = NOW - DAY
    until: datetime = NOW + DAY
    name: str = NAME
    constraints: bool = True
    usage: bool = True
    signs: bool = True


def certificate(options: Options = Options()) -> tuple[bytes, bytes]:  # noqa: B008
    """Key and certificate as PEM, signed by itself."""
    key = options.key or ec.generate_private_key(ec.SECP256R1())
    common = [x509.NameAttribute(NameOID.COMMON_NAME, options.name)] if options.name else []
    subject = x509.Name(common)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(options.since)
        .not_valid_after(options.until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(options.name or NAME)]), False)
    )
    if options.constraints:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    if options.usage:
        usage = x509.KeyUsage(
            digital_signature=options.signs,
            key_cert_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            crl_sign=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, True)
    signed = builder.sign(key, getattr(hashes, options.digest)() if options.digest else None)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, signed.public_bytes(serialization.Encoding.PEM)


def check(options: Options) -> str:
    return common_name(certificate(options)[1], NOW.timestamp())


def test_acceptable_certificates() -> None:
    assert check(Options()) == NAME
    assert check(Options(key=rsa.generate_private_key(65537, 3072))) == NAME
    strong = Options(key=rsa.generate_private_key(65537, 3072), digest="SHA512")
    assert check(strong) == NAME


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(since=NOW - 3 * DAY, until=NOW - DAY), "expired"),
        (Options(since=NOW + DAY, until=NOW + 3 * DAY), "not valid before"),
        (Options(key=rsa.generate_private_key(65537, 2048)), "2048 bits .at least 3072 required"),
        (Options(key=ec.generate_private_key(ec.SECP224R1())), "224 bits .at least 256 required"),
        (Options(digest="SHA384"), "signature algorithm is 1.2.840.10045.4.3.3"),
        (Options(key=ed25519.Ed25519PrivateKey.generate(), digest=None), "neither RSA nor EC"),
        (Options(constraints=False), "basicConstraints"),
        (Options(usage=False), "keyUsage"),
        (Options(signs=False), "does not allow digital signatures"),
        (Options(name=""), "no common name"),
    ],
)
def test_certificate_is_refused_with_the_reason(options: Options, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(options)


def test_all_reasons_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"expired.*basicConstraints.*keyUsage"):
        check(Options(since=NOW - 3 * DAY, until=NOW - DAY, constraints=False, usage=False))


def test_text_that_is_not_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="not a PEM certificate"):
        common_name(b"hello", NOW.timestamp())


@pytest.fixture
def identity() -> tuple[bytes, bytes]:
    return certificate()


@pytest.fixture
def server(identity: tuple[bytes, bytes]) -> Iterator[Running]:
    running = Running(grpc.ssl_server_credentials([identity]))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TASKD_RECOVER_RPC_TIMEOUT_S", "10")
    yield
    if DLRecoverManager.instance is not None:
        DLRecoverManager.instance.close()
        DLRecoverManager.instance = None


def test_server_with_the_expected_certificate_is_trusted(
    server: Running, identity: tuple[bytes, bytes], tmp_path: Path
) -> None:
    path = tmp_path / "server.crt"
    path.write_bytes(identity[1])
    info = pb.ClientInfo(ip="10.0.0.1", port="1", taskId="job-1", role="master agent")
    client = DLRecoverManager(info, server.address, cert_path=str(path))
    client.init_clusterd()
    assert client.register(info).code == 0
    assert server.clusterd.next_call("Register").jobId == "job-1"
    assert recover_manager.report_process_fault({3: 1}) == 0
    thread = threading.Thread(target=client.start_subscribe, daemon=True)
    thread.start()
    server.clusterd.next_call("Subscribe")
    client.close()
    thread.join(20)
    assert not thread.is_alive()


def test_client_certificate_is_presented_to_a_server_that_requires_one(
    identity: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Authority(tmp_path, "clients")
    key, crt = clients.issue("job:job-1")
    ca = clients.ca.read_bytes()
    running = Running(grpc.ssl_server_credentials([identity], ca, require_client_auth=True))
    path = tmp_path / "server.crt"
    path.write_bytes(identity[1])
    info = pb.ClientInfo(taskId="job-1")
    without = DLRecoverManager(info, running.address, cert_path=str(path))
    with pytest.raises(grpc.RpcError):
        without.register(info)
    monkeypatch.setenv("TASKD_CLUSTERD_CRT", crt)
    monkeypatch.setenv("TASKD_CLUSTERD_KEY", key)
    with_certificate = DLRecoverManager(info, running.address, cert_path=str(path))
    assert with_certificate.register(info).code == 0
    without.close()
    running.stop()


def test_server_with_another_certificate_is_not_trusted(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "other.crt"
    path.write_bytes(certificate()[1])
    info = pb.ClientInfo(taskId="job-1")
    client = DLRecoverManager(info, server.address, cert_path=str(path))
    with pytest.raises(grpc.RpcError):
        client.register(info)
    assert server.clusterd.calls.empty()


def test_weak_certificate_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "weak.crt"
    path.write_bytes(certificate(Options(usage=False))[1])
    with pytest.raises(ValueError, match=r"weak\.crt is not acceptable: .*keyUsage"):
        DLRecoverManager(pb.ClientInfo(), "127.0.0.1:1", cert_path=str(path))
    assert DLRecoverManager.instance is None


def test_unreadable_certificates_are_refused(tmp_path: Path) -> None:
    info = pb.ClientInfo(taskId="job-1")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "large").write_bytes(bytes(1024 * 1024 + 1))
    for name in ("", "absent", "empty", "link", "large", "."):
        with pytest.raises(ValueError, match="certificate"):
            DLRecoverManager(info, "127.0.0.1:1", cert_path=str(tmp_path / name) if name else "")


def test_connection_without_encryption() -> None:
    running = Running()
    client = DLRecoverManager(pb.ClientInfo(taskId="j"), running.address, secure_conn=False)
    assert client.register(recover_pb2.ClientInfo(jobId="j", role="r")).code == 0
    client.close()
    running.stop()


def test_both_packages_have_their_own_instance() -> None:
    from taskd.python.toolkit.recover_module import DLRecoverManager as TaskdsManager

    before = TaskdsManager.instance
    DLRecoverManager(pb.ClientInfo(taskId="j"), "127.0.0.1:1", secure_conn=False)
    assert TaskdsManager.instance is before


def test_job_may_be_named_by_task_id_or_job_id() -> None:
    wire = recover_pb2.ClientInfo(jobId="j", role="r")
    assert to_wire(wire) is wire
    assert to_wire(pb.ClientInfo(taskId="j", role="r", ip="1.2.3.4", port="5")) == wire
    assert to_wire(pb.ClientInfo(jobId="j", role="r")) == wire
    assert to_wire(SimpleNamespace(taskId="j", role="r")) == wire
    assert pb.ClientInfo(jobId="j").taskId == "j"


def test_environment_names_job_server_and_encryption(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MINDX_TASK_ID", "job-9")
    monkeypatch.setenv("MINDX_SERVER_IP", "10.0.0.9")
    monkeypatch.setenv("ELASTIC_GRPC_SECURE_CONNECT", "off")
    client = recover_manager.init_grpc_recover_manager()
    assert (client.client_info.jobId, client.server_addr) == ("job-9", "10.0.0.9:8899")
    monkeypatch.setenv("ELASTIC_GRPC_SECURE_CONNECT", "on")
    monkeypatch.setenv("ELASTIC_GRPC_SECURE_CERTIFICATES_PATH", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="certificate"):
        recover_manager.init_grpc_recover_manager()
    monkeypatch.delenv("MINDX_TASK_ID")
    with pytest.raises(ValueError, match="MINDX_TASK_ID"):
        recover_manager.init_grpc_recover_manager()


def test_version_is_that_of_taskd() -> None:
    assert mindx_elastic.__version__ == taskd.__version__
