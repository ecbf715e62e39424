"""Who may speak: mutual TLS, and a token that binds a peer to its job and its place.

A job has one secret. A peer shows a token derived from it for its own job, role and ranks, so
that a token that leaks opens one place only. A certificate can bind its holder in the same way, by
a name `taskd://job/role/server rank/process rank` in it, where `*` stands for any. Where there is
no token, it has to: otherwise whoever has a certificate could take any place of any job.
Used by the bus (`bus/admission.py`) and by clusterd's server.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import grpc

from taskd.config import environ, load
from taskd.errors import SettingsError
from taskd.model.ids import Position

JOB_KEY, TOKEN_KEY = "taskd-job", "taskd-token"
SCHEME = "taskd://"
BADGE = "badge:"
"""Marks a token that was derived already, by someone who keeps the secret to himself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """Files in PEM form. A server needs ca, server_key and server_crt; a client the other three."""

    ca: str
    server_key: str = ""
    server_crt: str = ""
    client_key: str = ""
    client_crt: str = ""
    server_name: str = ""
    """The name to expect in the server's certificate, when it is not the one that is dialled."""


def membership(environ: Mapping[str, str]) -> tuple[str, str]:
    """The job and its secret, as processes of the documented interface are told them."""
    job = environ.get("TASKD_JOB_ID") or environ.get("MINDX_TASK_ID", "")
    return job, environ.get("TASKD_TOKEN", "")


def tls_from_environment() -> Tls | None:
    """TASKD_TLS_CA, TASKD_TLS_SERVER_KEY and so on; None when no authority is named."""
    return load(Tls, prefix="TASKD_TLS") if environ.get("TASKD_TLS_CA") else None


def tls_of(config: Mapping[str, Any]) -> Tls | None:
    """From the documented keys `enable_tls` and `tls_conf`, or else from the environment."""
    if not config.get("enable_tls"):
        return tls_from_environment()
    files = config.get("tls_conf")
    told = dict(files) if isinstance(files, Mapping) else getattr(files, "__dict__", {})
    known = {item.name for item in fields(Tls)}
    if not told.get("ca") or not known.issuperset(told):
        raise SettingsError([f"enable_tls needs tls_conf with {', '.join(sorted(known))}"])
    return Tls(**told)


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Clients must show a certificate of the same authority."""
    key, crt, ca = read_pem(
        ("server_key", tls.server_key), ("server_crt", tls.server_crt), ("ca", tls.ca)
    )
    return grpc.ssl_server_credentials([(key, crt)], ca, require_client_auth=True)


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    key, crt, ca = read_pem(
        ("client_key", tls.client_key), ("client_crt", tls.client_crt), ("ca", tls.ca)
    )
    return grpc.ssl_channel_credentials(ca, key, crt)


def read_pem(*files: tuple[str, str]) -> list[bytes]:
    """What is in them, each named by what it is for. Raises SettingsError with all problems."""
    problems, contents = [], []
    for name, path in files:
        try:
            contents.append(Path(path).read_bytes())
        except OSError as error:
            problems.append(f"tls: {name} {path!r} cannot be read: {error.strerror}")
        else:
            if b"-----BEGIN " not in contents[-1]:
                problems.append(f"tls: {name} {path!r} is no PEM file")
    if problems:
        raise SettingsError(problems)
    return contents


def make_token(secret: str, job: str, position: Position) -> str:
    """What a peer at this position shows. A `badge:` token is shown as it is."""
    if secret.startswith(BADGE):
        return secret.removeprefix(BADGE)
    claim = [job, position.role, position.server_rank, position.process_rank]
    text = "".join(f"{len(part)}:{part}" for part in claim)
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def make_badge(secret: str, job: str, position: Position) -> str:
    """A token to hand to the one process that is to take this position, instead of the secret."""
    return BADGE + make_token(secret, job, position)


def make_seal(secret: str, job: str) -> str:
    """The key under which the ranks of this job seal the state that they give each other."""
    return hmac.new(secret.encode(), f"state of {job}".encode(), hashlib.sha256).hexdigest()


def names_positions(names: Iterable[str]) -> bool:
    return any(name.startswith(SCHEME) for name in names)


def is_certified(names: Iterable[str], job: str, position: Position) -> bool:
    """Whether one of the names allows this place."""
    places = [name.removeprefix(SCHEME).split("/") for name in names if name.startswith(SCHEME)]
    wanted = (job, position.role, position.server_rank, position.process_rank)
    return any(
        len(parts) == len(wanted)
        and all(part in ("*", want) for part, want in zip(parts, wanted, strict=True))
        for parts in places
    )


def check_token(shown: str, secret: str, job: str, position: Position) -> bool:
    return hmac.compare_digest(shown.encode(), make_token(secret, job, position).encode())
