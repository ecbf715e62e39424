"""How a client of clusterd encrypts: which server it trusts, and which certificate is its own.

Used by the manager, by the commands and by the documented recover clients.
"""

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
    """The certificate that proves clusterd. Empty: the connection is not encrypted."""

    crt: str = ""
    """The client's own certificate, for a clusterd that asks for one."""

    key: str = ""
    """The key of that certificate."""


def from_environment() -> ClusterdTlsSettings:
    return load(ClusterdTlsSettings, prefix="TASKD_CLUSTERD")


def credentials(told: ClusterdTlsSettings) -> grpc.ChannelCredentials | None:
    """None: nothing is to be encrypted. Raises SettingsError with all that is wrong."""
    problems = []
    if bool(told.crt) != bool(told.key):
        problems.append("a client's certificate and its key are given together or not at all")
    if told.crt and not told.ca:
        problems.append("a client's certificate needs the one that proves clusterd, too (ca)")
    if problems:
        raise SettingsError(problems)
    if not told.ca:
        return None
    files = [("ca", told.ca)]
    if told.crt:
        files += [("the client's key", told.key), ("the client's certificate", told.crt)]
    return grpc.ssl_channel_credentials(*read_pem(*files))
