"""Where etcd is, how to sign in, and which versions are accepted."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields

from taskd.bus.security import client_files
from taskd.bus.tls_files import TlsFiles
from taskd.config import load
from taskd.errors import SettingsError
from taskd.runtime.address import Address

OLDEST, NEWEST = (3, 4, 0), (3, 6)
"""The first version that is accepted, and the last line of versions that is known."""
LOSES_DATA = ((3, 5, 0), (3, 5, 1), (3, 5, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdSettings:
    """Read from the environment with the prefix `TASKD_ETCD`."""

    user: str = ""
    """The user to sign in as; empty: etcd has no users, or knows the certificate."""

    password: str = field(default="", repr=False)
    """The password of that user."""

    ca: str = ""
    """The authority of etcd's certificates, as a PEM file. Empty: no encryption."""

    crt: str = ""
    """The certificate of this client, for an etcd that requires one."""

    key: str = ""
    """The key of that certificate."""

    follow_members: bool = False
    """Use the addresses that etcd's members advertise, as they come and go, after the first."""

    def problems(self) -> list[str]:
        found = []
        if bool(self.user) != bool(self.password):
            found.append("TASKD_ETCD_USER and TASKD_ETCD_PASSWORD must be set together")
        if bool(self.crt) != bool(self.key):
            found.append("TASKD_ETCD_CRT and TASKD_ETCD_KEY must be set together")
        if self.crt and not self.ca:
            found.append("TASKD_ETCD_CRT needs TASKD_ETCD_CA")
        return found

    def files(self) -> TlsFiles:
        """Raises SettingsError if a file cannot be used."""
        return TlsFiles("etcd", client_files(self.ca, self.key, self.crt))


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Everything that a client of one etcd needs."""

    addresses: tuple[str, ...]
    settings: EtcdSettings

    def environment(self) -> dict[str, str]:
        """For a process that reads its settings with `settings()`."""
        return {
            f"TASKD_ETCD_{one.name.upper()}": str(getattr(self.settings, one.name))
            for one in fields(EtcdSettings)
        }


def settings() -> EtcdSettings:
    found = load(EtcdSettings, prefix="TASKD_ETCD")
    if problems := found.problems():
        raise SettingsError(problems)
    return found


def addresses(text: str) -> tuple[str, ...]:
    """From `HOST:PORT,HOST:PORT`. Raises SettingsError that names each wrong part."""
    found, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(str(Address.parse(part)))
        except SettingsError as error:
            problems += error.problems
    if not found and not problems:
        problems = ["--etcd needs at least one address: HOST:PORT,HOST:PORT,…"]
    if problems:
        raise SettingsError(problems)
    return tuple(dict.fromkeys(found))


def why_refused(version: str) -> str:
    """Why this version of etcd is not used; empty if it is."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is None:
        return f"etcd has the unknown version {version!r} (expected 3.4, 3.5 from 3.5.3 on, or 3.6)"
    numbers = (int(found[1]), int(found[2]), int(found[3]))
    if numbers in LOSES_DATA:
        return f"etcd {version} can lose data after a crash: install 3.5.3 or newer, or 3.4"
    if numbers < OLDEST or numbers[:2] > NEWEST:
        return f"etcd {version} is not supported (expected 3.4, 3.5 from 3.5.3 on, or 3.6)"
    return ""
