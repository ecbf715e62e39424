"""Authentication on the bus: mutual TLS, and a token that binds a peer to its job and position.

A job has one secret. A peer sends a token derived from it for its own job, role and ranks, so that
a leaked token is good for one position only. A certificate can bind its holder in the same way, by
a name `taskd://job/role/server rank/process rank` in it, where `*` matches any. Without a token it
must: otherwise any holder of a certificate could take any position of any job.
Used by the bus (`bus/admission.py`) and by clusterd's server.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import grpc

from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.model.ids import Position

log = logging.getLogger(__name__)

JOB_KEY, RUN_KEY, TOKEN_KEY = "taskd-job", "taskd-run", "taskd-token"
SCHEME = "taskd://"
BADGE = "badge:"
"""Marks a token that is derived already, for a process that must not know the secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Files in PEM form. A server needs ca, server_key and server_crt; a client the other three."""

    ca: str
    server_key: str = ""
    server_crt: str = ""
    client_key: str = ""
    client_crt: str = ""
    server_name: str = ""
    """The name expected in the server's certificate, if it differs from the host of the address."""


def membership(environ: Mapping[str, str]) -> tuple[str, str]:
    """The job and its secret, from the environment variables of the documented interface."""
    job = environ.get("TASKD_JOB_ID") or environ.get("MINDX_TASK_ID", "")
    return job, environ.get("TASKD_TOKEN", "")


def token_file_from_environment() -> str:
    """A file of secrets for the connections between proxies and their manager; empty: none."""
    return environ.get("TASKD_BUS_TOKEN_FILE", "")


def tls_from_environment() -> Tls | None:
    """From TASKD_TLS_CA, TASKD_TLS_SERVER_KEY and so on; None: TASKD_TLS_CA is not set."""
    return load(Tls, prefix="TASKD_TLS") if environ.get("TASKD_TLS_CA") else None


def tls_of(config: Mapping[str, Any]) -> Tls | None:
    """From the documented keys `enable_tls` and `tls_conf`, or else from the environment."""
    if not config.get("enable_tls"):
        return tls_from_environment()
    files = config.get("tls_conf")
    given = dict(files) if isinstance(files, Mapping) else getattr(files, "__dict__", {})
    known = {item.name for item in fields(Tls)}
    if not given.get("ca") or not known.issuperset(given):
        raise SettingsError([f"enable_tls needs tls_conf with {', '.join(sorted(known))}"])
    return Tls(**given)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Clients must have a certificate of the same authority."""
    return renewed_credentials(
        ("server_key", tls.server_key), ("server_crt", tls.server_crt), ("ca", tls.ca)
    )


def renewed_credentials(*files: tuple[str, str]) -> grpc.ServerCredentials:
    """From the files of key, certificate and, to require client certificates, their authority.

    They are read again for each new connection after they have changed. If they cannot be used
    then (half written, or a key that does not fit), the last good ones stay in use.
    """
    used = read_pem(*files)

    def renew() -> Any:  # None: no change. The stubs of gRPC do not know that.
        nonlocal used
        try:
            found = read_pem(*files)
            if found == used:
                return None
            check_pair(found[0], found[1])
        except (SettingsError, ValueError, ssl.SSLError, OSError) as error:
            log.warning("the changed TLS files are not used: %s", error)
            return None
        used = found
        log.info("TLS files were renewed: %s", files[1][1])
        return _certificates(found)

    return grpc.dynamic_ssl_server_credentials(_certificates(used), renew, len(files) > 2)


def _certificates(contents: list[bytes]) -> grpc.ServerCertificateConfiguration:
    authority = contents[2] if len(contents) > 2 else None
    return grpc.ssl_server_certificate_configuration([(contents[0], contents[1])], authority)


def check_pair(key: bytes, certificate: bytes) -> None:
    """Raises ssl.SSLError if the key does not fit the certificate."""
    with NamedTemporaryFile() as key_file, NamedTemporaryFile() as certificate_file:
        for file, content in ((key_file, key), (certificate_file, certificate)):
            file.write(content)
            file.flush()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate_file.name, key_file.name)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    key, crt, ca = read_pem(
        ("client_key", tls.client_key), ("client_crt", tls.client_crt), ("ca", tls.ca)
    )
    return grpc.ssl_channel_credentials(ca, key, crt)


def read_pem(*files: tuple[str, str]) -> list[bytes]:
    """The contents of (name, path) pairs. Raises SettingsError with all problems."""
    problems, contents = [], []
    for name, path in files:
        try:
            contents.append(Path(path).read_bytes())
        except OSError as error:
            problems.append(f"tls: {name} {path!r} cannot be read: {error.strerror}")
        else:
            if b"-----BEGIN " not in contents[-1]:
                problems.append(f"tls: {name} {path!r} is not a PEM file")
    if problems:
        raise SettingsError(problems)
    return contents


def make_token(secret: str, job: str, position: Position) -> str:
    """The token of a peer at this position. A `badge:` is used as it is."""
    if secret.startswith(BADGE):
        return secret.removeprefix(BADGE)
    claim = [job, position.role, position.server_rank, position.process_rank]
    text = "".join(f"{len(part)}:{part}" for part in claim)
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def make_badge(secret: str, job: str, position: Position) -> str:
    """A token for the one process that takes this position, to give it instead of the secret."""
    return BADGE + make_token(secret, job, position)


def make_seal(secret: str, job: str) -> str:
    """The key with which the ranks of this job sign the state that they send each other."""
    return hmac.new(secret.encode(), f"state of {job}".encode(), hashlib.sha256).hexdigest()


def make_checkpoint_key(secret: str) -> str:
    """The key that signs emergency checkpoints: the next start of the job needs the same one."""
    return hmac.new(secret.encode(), b"emergency checkpoints", hashlib.sha256).hexdigest()


def names_positions(names: Iterable[str]) -> bool:
    return any(name.startswith(SCHEME) for name in names)


def is_certified(names: Iterable[str], job: str, position: Position) -> bool:
    """Whether one of the names allows this position."""
    allowed = [name.removeprefix(SCHEME).split("/") for name in names if name.startswith(SCHEME)]
    wanted = (job, position.role, position.server_rank, position.process_rank)
    return any(
        len(parts) == len(wanted)
        and all(part in ("*", want) for part, want in zip(parts, wanted, strict=True))
        for parts in allowed
    )


def check_token(token: str, secret: str, job: str, position: Position) -> bool:
    return hmac.compare_digest(token.encode(), make_token(secret, job, position).encode())


# Clients of clusterd: the manager, the commands and the documented recover clients


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterdTlsSettings:
    """Read from the environment with the prefix `TASKD_CLUSTERD`. Files in PEM form."""

    ca: str = ""
    """The certificate authority of clusterd. Empty: the connection is not encrypted."""

    crt: str = ""
    """The client's certificate, for a clusterd that requires one."""

    key: str = ""
    """The key of that certificate."""


def clusterd_tls_from_environment() -> ClusterdTlsSettings:
    return load(ClusterdTlsSettings, prefix="TASKD_CLUSTERD")


def clusterd_credentials(settings: ClusterdTlsSettings) -> grpc.ChannelCredentials | None:
    """None: the connection is not encrypted. Raises SettingsError with all problems."""
    files = clusterd_files(settings)
    return grpc.ssl_channel_credentials(*read_pem(*files)) if files else None


def clusterd_files(settings: ClusterdTlsSettings) -> list[tuple[str, str]]:
    """(name, path) in the order in which gRPC takes their contents. Raises SettingsError."""
    problems = []
    if bool(settings.crt) != bool(settings.key):
        problems.append("set both the client certificate (crt) and its key, or neither")
    if settings.crt and not settings.ca:
        problems.append(
            "a client certificate (crt) also needs the certificate authority of clusterd (ca)"
        )
    if problems:
        raise SettingsError(problems)
    return client_files(settings.ca, settings.key, settings.crt)


def client_files(ca: str, key: str, crt: str) -> list[tuple[str, str]]:
    """Of a client's files those that have a name."""
    named = (("ca", ca), ("client key", key), ("client certificate", crt))
    return [(name, path) for name, path in named if path]
