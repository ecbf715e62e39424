"""TLS of clusterd's clients: the manager, the commands and the documented recover clients."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from taskd.bus.security import read_pem
from taskd.config import load
from taskd.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterdTlsSettings:
    """Read from the environment with the prefix `TASKD_CLUSTERD`. Files in PEM form."""

    ca: str = ""
    """The certificate authority of clusterd. Empty: the connection is not encrypted."""

    crt: str = ""
    """The client's certificate, for a clusterd that requires one."""

    key: str = ""
    """The key of that certificate."""


def from_environment() -> ClusterdTlsSettings:
    return load(ClusterdTlsSettings, prefix="TASKD_CLUSTERD")


def credentials(settings: ClusterdTlsSettings) -> grpc.ChannelCredentials | None:
    """None: the connection is not encrypted. Raises SettingsError with all problems."""
    problems = []
    if bool(settings.crt) != bool(settings.key):
        problems.append("set both the client certificate (crt) and its key, or neither")
    if settings.crt and not settings.ca:
        problems.append(
            "a client certificate (crt) also needs the certificate authority of clusterd (ca)"
        )
    if problems:
        raise SettingsError(problems)
    if not settings.ca:
        return None
    files = [("ca", settings.ca)]
    if settings.crt:
        files += [("client key", settings.key), ("client certificate", settings.crt)]
    return grpc.ssl_channel_credentials(*read_pem(*files))
