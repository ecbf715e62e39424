"""The connection of a recover client: address, deadlines, token, encryption.

MindCluster's rules decide whether the certificate of a server is acceptable; all problems are
reported at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from taskd.bus.security import (
    ClusterdTlsSettings,
    clusterd_credentials,
    clusterd_tls_from_environment,
)
from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.runtime.clock import wall
from taskd.runtime.files import private_files as files
from taskd.runtime.tokens import ClientToken, bearer

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger("taskd.recover")

PORT = 8899
LOOPBACK = "127.0.0.1"

RSA_BITS, EC_BITS = 3072, 256
SIGNATURES = {
    "1.2.840.113549.1.1.11": "sha256WithRSAEncryption",
    "1.2.840.113549.1.1.13": "sha512WithRSAEncryption",
    "1.2.840.10045.4.3.2": "ecdsa-with-SHA256",
}

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 1),
)
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""A new channel connects at once; with a shared connection it would wait for gRPC's backoff."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverClientSettings:
    """Read from the environment with the prefix `TASKD_RECOVER`."""

    rpc_timeout_s: float = 10.0
    """Time limit for one call to clusterd."""

    retry_s: float = 5.0
    """Pause before the next try of Init or Register."""

    backoff_limit_s: float = 10.0
    """The longest pause before a lost subscription is renewed; the first pause is 1 s."""

    health_interval_s: float = 1.0
    """Pause between two health checks."""

    health_pause_s: float = 10.0
    """How long the subscription may take to recover by itself after a failed health check."""

    silence_s: float = 30.0
    """A subscription without any message, even a keep-alive, for this long is renewed."""

    action_timeout_s: float = 60.0
    """How long the engine may take to accept one order."""

    engine_start_timeout_s: float = 600.0
    """How long the engine may take to reach a training process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, float) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class Security:
    """Encrypt, and trust only a server that presents this certificate."""

    certificate_path: str


def settings() -> RecoverClientSettings:
    return load(RecoverClientSettings, prefix="TASKD_RECOVER")


def server_address(environment: Mapping[str, str] = environ) -> str:
    """clusterd's address as `host:port`, from the documented variables."""
    host = environment.get("MINDX_SERVER_IP", "")
    if environment.get("LOCAL_PROXY_ENABLE") == "on":
        host = LOOPBACK
    if not host:
        raise ValueError("MINDX_SERVER_IP is not set: clusterd's address is unknown")
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{PORT}" if ":" in bare else f"{bare}:{PORT}"


def open_channel(
    address: str, own: RecoverClientSettings, security: Security | None
) -> grpc.Channel:
    """A channel that connects in the background; ValueError if the certificate is not acceptable.

    If the server requires a certificate of the client, the environment names it.
    """
    own_tls = clusterd_tls_from_environment()
    options: tuple[tuple[str, int | str], ...] = (*KEEPALIVE, OWN_CONNECTION)
    if security is None:
        encrypted = _credentials(own_tls)
        channel = (
            grpc.insecure_channel(address, options=options)
            if encrypted is None
            else grpc.secure_channel(address, encrypted, options=options)
        )
    else:
        pem = _read(security.certificate_path)
        try:
            name = common_name(pem, wall())
        except ValueError as error:
            reason = f"the certificate {security.certificate_path} is not acceptable: {error}"
            raise ValueError(reason) from error
        encrypted = _credentials(replace(own_tls, ca=security.certificate_path))
        assert encrypted is not None
        options = (*options, ("grpc.ssl_target_name_override", name))
        channel = grpc.secure_channel(address, encrypted, options=options)
    return grpc.intercept_channel(channel, _CallDefaults(own))


def _credentials(tls: ClusterdTlsSettings) -> grpc.ChannelCredentials | None:
    try:
        return clusterd_credentials(tls)
    except SettingsError as error:
        raise ValueError(str(error)) from error


def _read(path: str) -> bytes:
    try:
        pem = files.read_small(path)
    except OSError as error:
        raise ValueError(f"the certificate cannot be read: {error}") from error
    if not pem:
        raise ValueError(f"the certificate {path} is empty")
    return pem


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: Any
    compression: Any


class _CallDetails(_Details, grpc.ClientCallDetails): ...


class _CallDefaults(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Adds the token to every call, and a deadline to calls that have none."""

    def __init__(self, own: RecoverClientSettings) -> None:
        self._timeout_s = own.rpc_timeout_s
        self._token = ClientToken(
            environ.get("TASKD_CLUSTERD_TOKEN", ""), environ.get("TASKD_CLUSTERD_TOKEN_FILE", "")
        )

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        timeout = details.timeout if details.timeout is not None else self._timeout_s
        return continuation(self._completed(details, timeout), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        # No deadline: a subscription has no end. The client ends one that receives nothing.
        return continuation(self._completed(details, details.timeout), request)

    def _completed(self, details: Any, timeout: float | None) -> _CallDetails:
        metadata = (*(details.metadata or ()), *bearer(self._token.now())) or None
        others = (details.credentials, details.wait_for_ready, details.compression)
        return _CallDetails(details.method, timeout, metadata, *others)


# Certificates


def common_name(pem: bytes, now: float) -> str:
    """The common name in the certificate; ValueError with all reasons if it is not acceptable."""
    try:
        from cryptography import x509
    except ImportError as error:
        raise ValueError(
            "certificates cannot be checked without the package `cryptography`: "
            "pip install 'taskd[secure]'"
        ) from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise ValueError(f"it is not a PEM certificate: {error}") from error
    problems = [
        *_date_problems(certificate, datetime.fromtimestamp(now, UTC)),
        *_strength_problems(certificate),
        *_purpose_problems(certificate),
    ]
    name = _common_name_of(certificate)
    if not name:
        problems.append("its subject has no common name")
    if problems:
        raise ValueError("; ".join(problems))
    return name


def _date_problems(certificate: x509.Certificate, now: datetime) -> list[str]:
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now <= since:
        return [f"it is not valid before {since:%Y-%m-%d %H:%M:%S} UTC"]
    if now >= until:
        return [f"it expired at {until:%Y-%m-%d %H:%M:%S} UTC"]
    return []


def _strength_problems(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    problems = []
    if certificate.version is not x509.Version.v3:
        problems.append("it is not an X.509 version 3 certificate")
    match certificate.public_key():
        case rsa.RSAPublicKey(key_size=bits) if bits < RSA_BITS:
            problems.append(f"its RSA key has {bits} bits (at least {RSA_BITS} required)")
        case ec.EllipticCurvePublicKey(key_size=bits) if bits < EC_BITS:
            problems.append(f"its EC key has {bits} bits (at least {EC_BITS} required)")
        case rsa.RSAPublicKey() | ec.EllipticCurvePublicKey():
            pass
        case _:
            problems.append("its key is neither RSA nor EC")
    signature = certificate.signature_algorithm_oid.dotted_string
    if signature not in SIGNATURES:
        known = " or ".join(SIGNATURES.values())
        problems.append(f"its signature algorithm is {signature} (expected {known})")
    return problems


def _purpose_problems(certificate: x509.Certificate) -> list[str]:
    from cryptography import x509

    problems = []
    try:
        certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        problems.append("its extension basicConstraints is missing")
    try:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage).value
    except x509.ExtensionNotFound:
        problems.append("its extension keyUsage is missing")
    else:
        if not usage.digital_signature:
            problems.append("its extension keyUsage does not allow digital signatures")
    return problems


def _common_name_of(certificate: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""
