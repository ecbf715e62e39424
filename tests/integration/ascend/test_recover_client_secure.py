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
from taskd.ascend.certificate import common_name
from taskd.ascend.documented.elastic_agent import to_wire
from taskd.wire._pb import recover_pb2
from tests.integration.ascend.recover_server import Running
from tests.integration.certificates import Authority

NAME = "clusterd.example"
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A certificate that is right in everything, unless the test says otherwise."""

    key: Any = None
    digest: Any = "SHA256"
    since: datetime = NOW - DAY
    until: datetime = NOW + DAY
    name: str = NAME
    constraints: bool = True
    usage: bool = True
    signs: bool = True


def certificate(wish: Wish = Wish()) -> tuple[bytes, bytes]:  # noqa: B008
    """Key and certificate as PEM, signed by itself."""
    key = wish.key or ec.generate_private_key(ec.SECP256R1())
    common = [x509.NameAttribute(NameOID.COMMON_NAME, wish.name)] if wish.name else []
    subject = x509.Name(common)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(wish.since)
        .not_valid_after(wish.until)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(wish.name or NAME)]), False)
    )
    if wish.constraints:
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    if wish.usage:
        usage = x509.KeyUsage(
            digital_signature=wish.signs,
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
    made = builder.sign(key, getattr(hashes, wish.digest)() if wish.digest else None)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private, made.public_bytes(serialization.Encoding.PEM)


def check(wish: Wish) -> str:
    return common_name(certificate(wish)[1], NOW.timestamp())


def test_good_certificates() -> None:
    assert check(Wish()) == NAME
    assert check(Wish(key=rsa.generate_private_key(65537, 3072))) == NAME
    strong = Wish(key=rsa.generate_private_key(65537, 3072), digest="SHA512")
    assert check(strong) == NAME


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        (Wish(since=NOW - 3 * DAY, until=NOW - DAY), "expired"),
        (Wish(since=NOW + DAY, until=NOW + 3 * DAY), "not valid before"),
        (Wish(key=rsa.generate_private_key(65537, 2048)), "2048 bits, 3072 are needed"),
        (Wish(key=ec.generate_private_key(ec.SECP224R1())), "224 bits, 256 are needed"),
        (Wish(digest="SHA384"), "signature algorithm 1.2.840.10045.4.3.3"),
        (Wish(key=ed25519.Ed25519PrivateKey.generate(), digest=None), "neither RSA nor EC"),
        (Wish(constraints=False), "basicConstraints"),
        (Wish(usage=False), "keyUsage"),
        (Wish(signs=False), "not for digital signatures"),
        (Wish(name=""), "no common name"),
    ],
)
def test_bad_certificates_are_refused_with_the_reason(wish: Wish, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check(wish)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"expired.*basicConstraints.*keyUsage"):
        check(Wish(since=NOW - 3 * DAY, until=NOW - DAY, constraints=False, usage=False))


def test_no_certificate_at_all() -> None:
    with pytest.raises(ValueError, match="no PEM certificate"):
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
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TASKD_RECOVER_RPC_TIMEOUT_S", "10")
    yield
    if DLRecoverManager.instance is not None:
        DLRecoverManager.instance.close()
        DLRecoverManager.instance = None


def test_a_server_with_the_right_certificate_is_trusted(
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


def test_a_server_that_asks_for_a_certificate_is_shown_one(
    identity: tuple[bytes, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = Authority(tmp_path, "clients")
    key, crt = clients.issue("job:job-1")
    ca = clients.ca.read_bytes()
    running = Running(grpc.ssl_server_credentials([identity], ca, require_client_auth=True))
    path = tmp_path / "server.crt"
    path.write_bytes(identity[1])
    info = pb.ClientInfo(taskId="job-1")
    bare = DLRecoverManager(info, running.address, cert_path=str(path))
    with pytest.raises(grpc.RpcError):
        bare.register(info)
    monkeypatch.setenv("TASKD_CLUSTERD_CRT", crt)
    monkeypatch.setenv("TASKD_CLUSTERD_KEY", key)
    shown = DLRecoverManager(info, running.address, cert_path=str(path))
    assert shown.register(info).code == 0
    bare.close()
    running.stop()


def test_a_server_with_another_certificate_is_not_trusted(server: Running, tmp_path: Path) -> None:
    path = tmp_path / "other.crt"
    path.write_bytes(certificate()[1])
    info = pb.ClientInfo(taskId="job-1")
    client = DLRecoverManager(info, server.address, cert_path=str(path))
    with pytest.raises(grpc.RpcError):
        client.register(info)
    assert server.clusterd.calls.empty()


def test_a_weak_certificate_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "weak.crt"
    path.write_bytes(certificate(Wish(usage=False))[1])
    with pytest.raises(ValueError, match=r"weak\.crt is refused: it does not say .*keyUsage"):
        DLRecoverManager(pb.ClientInfo(), "127.0.0.1:1", cert_path=str(path))
    assert DLRecoverManager.instance is None


def test_unreadable_certificates(tmp_path: Path) -> None:
    info = pb.ClientInfo(taskId="job-1")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "large").write_bytes(bytes(1024 * 1024 + 1))
    for name in ("", "absent", "empty", "link", "large", "."):
        with pytest.raises(ValueError, match="certificate"):
            DLRecoverManager(info, "127.0.0.1:1", cert_path=str(tmp_path / name) if name else "")


def test_without_security() -> None:
    running = Running()
    client = DLRecoverManager(pb.ClientInfo(taskId="j"), running.address, secure_conn=False)
    assert client.register(recover_pb2.ClientInfo(jobId="j", role="r")).code == 0
    client.close()
    running.stop()


def test_clients_of_both_packages_are_apart() -> None:
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


def test_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_version() -> None:
    assert mindx_elastic.__version__ == taskd.__version__
