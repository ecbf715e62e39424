"""The connection of a recover client: address, deadlines, token, encryption."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import grpc

from taskd.ascend.certificate import common_name
from taskd.bus.clusterd_tls import ClusterdTlsSettings, credentials, from_environment
from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.runtime import small_file
from taskd.runtime.clock import wall
from taskd.runtime.tokens import bearer

log = logging.getLogger("taskd.recover")

PORT = 8899
LOOPBACK = "127.0.0.1"

KEEPALIVE = (
    ("grpc.keepalive_time_ms", 3000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 1),
)
OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)
"""A channel that is made anew dials at once; a shared connection would sit out its backoff."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoverClientSettings:
    """Read from the environment with the prefix `TASKD_RECOVER`."""

    rpc_timeout_s: float = 10.0
    """How long clusterd may take to answer one call."""

    retry_s: float = 5.0
    """Pause before Init or Register is tried again."""

    backoff_limit_s: float = 10.0
    """The longest pause before a lost subscription is taken up again; it starts at 1 s."""

    health_interval_s: float = 1.0
    """Pause between two health checks."""

    health_pause_s: float = 10.0
    """How long the subscription has, after a failed health check, to come back by itself."""

    silence_s: float = 30.0
    """A subscription on which not even a keep-alive has come for so long is made anew."""

    action_timeout_s: float = 60.0
    """How long the engine may take to accept one order."""

    engine_start_timeout_s: float = 600.0
    """How long the engine may take until it has reached a training process."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, float) and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, slots=True)
class Security:
    """Encrypt, and trust the server that shows this certificate."""

    certificate_path: str


def settings() -> RecoverClientSettings:
    return load(RecoverClientSettings, prefix="TASKD_RECOVER")


def server_address(environment: Mapping[str, str] = environ) -> str:
    """Where clusterd is, as `host:port`, from the documented variables."""
    host = environment.get("MINDX_SERVER_IP", "")
    if environment.get("LOCAL_PROXY_ENABLE") == "on":
        host = LOOPBACK
    if not host:
        raise ValueError("MINDX_SERVER_IP is not set: clusterd's address is not known")
    bare = host.removeprefix("[").removesuffix("]")
    return f"[{bare}]:{PORT}" if ":" in bare else f"{bare}:{PORT}"


def open_channel(
    address: str, own: RecoverClientSettings, security: Security | None
) -> grpc.Channel:
    """Connects in the background. Raises ValueError if the certificate is not acceptable.

    A client's own certificate, for a server that asks for one, is named by the environment.
    """
    own_tls = from_environment()
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
            reason = f"the certificate {security.certificate_path} is refused: {error}"
            raise ValueError(reason) from error
        encrypted = _credentials(replace(own_tls, ca=security.certificate_path))
        assert encrypted is not None
        options = (*options, ("grpc.ssl_target_name_override", name))
        channel = grpc.secure_channel(address, encrypted, options=options)
    return grpc.intercept_channel(channel, _Habits(own))


def _credentials(told: ClusterdTlsSettings) -> grpc.ChannelCredentials | None:
    try:
        return credentials(told)
    except SettingsError as error:
        raise ValueError(str(error)) from error


def _read(path: str) -> bytes:
    try:
        pem = small_file.read(path)
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


class _Habits(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[type-arg]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[type-arg]
):
    """Gives every call the deadline and the token that its caller did not mention."""

    def __init__(self, own: RecoverClientSettings) -> None:
        self._timeout_s = own.rpc_timeout_s
        self._token = bearer(environ.get("TASKD_CLUSTERD_TOKEN", ""))

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        timeout = details.timeout if details.timeout is not None else self._timeout_s
        return continuation(self._with(details, timeout), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        # No deadline: a subscription lasts. The client ends one on which nothing comes.
        return continuation(self._with(details, details.timeout), request)

    def _with(self, details: Any, timeout: float | None) -> _CallDetails:
        metadata = (*(details.metadata or ()), *self._token) or None
        others = (details.credentials, details.wait_for_ready, details.compression)
        return _CallDetails(details.method, timeout, metadata, *others)
