"""Finds etcd on this machine and checks whether TaskD can use it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from taskd.clusterd.etcd.etcd_settings import why_refused
from taskd.config import load

PACKAGE = "etcd-server"
COST = "if node 0 is lost, the job waits for it and then ends"
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdMemberSettings:
    """Read from the environment with the prefix `TASKD_ETCD_MEMBER`."""

    binary: str = ""
    """The etcd that `taskd run` starts for a job of several nodes; empty: `etcd` from PATH."""

    folder: str = ""
    """Where its data is kept while the job runs; empty: in shared memory (125 MiB)."""

    join: str = ""
    """host:port of a member of the job's etcd: for a new machine that joins the running job while
    node 0 is gone."""


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    path: str
    version: str


@dataclass(frozen=True, slots=True)
class NoEtcd:
    """Why this node cannot run a member, and what to do."""

    because: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.because}. {self.remedy}"


def member_settings() -> EtcdMemberSettings:
    return load(EtcdMemberSettings, prefix="TASKD_ETCD_MEMBER")


def no_certificates() -> NoEtcd | None:
    """Why this node cannot make certificates from the job's token; None: it can."""
    if find_spec("cryptography") is not None:
        return None
    because = "etcd needs certificates, and the library `cryptography` is not installed"
    return NoEtcd(because, "pip install 'taskd[secure]', on every node")


def find(settings: EtcdMemberSettings, *, encrypted: bool) -> EtcdBinary | NoEtcd:
    """`encrypted`: the members need certificates, and these need the library `cryptography`."""
    named = settings.binary or "etcd"
    path = shutil.which(named)
    if path is None:
        install = f"Install it (Debian: apt-get install {PACKAGE}), or set"
        return NoEtcd(f"{named} is not installed", f"{install} TASKD_ETCD_MEMBER_BINARY")
    if encrypted and (lacking := no_certificates()):
        return lacking
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return NoEtcd(f"{path} does not start: {error}", "Install another etcd")
    found = re.search(r"etcd Version: (\S+)", done.stdout)
    version = found[1] if found else done.stdout.strip()[:40]
    if why := why_refused(version):
        return NoEtcd(f"{Path(path)}: {why}", "Set TASKD_ETCD_MEMBER_BINARY to another one")
    return EtcdBinary(path, version)
