"""`taskd doctor`: checks what works on this machine, what does not, why, and what to do.

Each check tries the real thing: it binds the port, forks, writes to shared memory. No framework is
imported into this process: versions are read from what pip has installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from taskd.agent.etcd_member import etcd_binary
from taskd.agent.etcd_member.etcd_binary import COST, NoEtcd
from taskd.agent.run import torch_check
from taskd.ascend import mspti
from taskd.runtime import log
from taskd.runtime.torch_versions import Support, judge, supported_torch
from taskd.version import __version__

PORTS = {9601: "the manager", 9602: "a node's proxy", 8899: "clusterd"}
SHARED_MEMORY_MIB = 64
OPEN_FILES = 1024


class Verdict(StrEnum):
    FINE = "ok"
    ABSENT = "absent"
    """Not installed; only some jobs need it."""
    LIMITED = "limited"
    """Usable, but something does not work."""
    BROKEN = "broken"
    """TaskD does not work without it."""


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    verdict: Verdict
    value: str
    because: str = ""
    """What does not work, and why."""
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Return 0 unless something is broken. Limited or absent parts do not count."""
    findings = list(examine())
    works = all(finding.verdict is not Verdict.BROKEN for finding in findings)
    if arguments.json:
        report = {"version": __version__, "works": works, "findings": list(map(asdict, findings))}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(_table(findings, works))
    return 0 if works else 1


def examine() -> Iterator[Finding]:
    yield from _basics()
    yield from _frameworks()
    for port, user in PORTS.items():
        yield _port(port, user)
    yield _tried("fork", _fork, "workers start by spawn, which takes seconds", basic=False)
    yield _tried(
        "pidfd", _pidfd, "the exit of a process is detected late: Linux 5.3 or newer is required"
    )
    yield _tried("shared memory", _shared_memory, "processes cannot share progress and snapshots")
    yield _etcd()
    yield _open_files()
    yield _log_directory()
    yield _library()


def _basics() -> Iterator[Finding]:
    yield Finding("python", Verdict.FINE, platform.python_version())
    yield _package("grpcio", (1, 66, 2), "processes cannot communicate", Verdict.BROKEN)
    yield _package("protobuf", (4, 25, 8), "processes cannot communicate", Verdict.BROKEN)


def _frameworks() -> Iterator[Finding]:
    yield _torch()
    yield _package("torch_npu", (), "torch cannot use Ascend devices", remedy=_pip("torch-npu"))
    yield _package("mindspore", (), "MindSpore jobs cannot run")
    engine = "a recover client without a manager cannot repair its job, only end it"
    yield _package("mindio_ttp", (), engine, remedy="install Ascend's MindIO for such jobs")
    yield _package(
        "cryptography", (46, 0, 5), "certificates cannot be checked", remedy=_pip("taskd[secure]")
    )
    server = _pip("taskd[server]")
    yield _package("pyyaml", (6,), "clusterd cannot read a cluster from YAML files", remedy=server)
    yield _package(
        "grpcio-health-checking", (1, 66, 2), "clusterd starts only with --no-health", remedy=server
    )
    yield _mspti()


def _package(
    name: str,
    least: tuple[int, ...],
    because: str,
    missing: Verdict = Verdict.ABSENT,
    remedy: str = "",
) -> Finding:
    remedy = remedy or _pip(name)
    found = _version(name)
    if found is None:
        return Finding(name, missing, "not installed", because, remedy)
    if _numbers(found) < least:
        worse = Verdict.LIMITED if missing is Verdict.ABSENT else missing
        wanted = ".".join(map(str, least))
        return Finding(
            name, worse, found, f"too old, {wanted} or newer is required: {because}", remedy
        )
    return Finding(name, Verdict.FINE, found)


def _pip(package: str) -> str:
    return f"pip install --upgrade '{package}'"


def _torch() -> Finding:
    found = _version("torch")
    if found is None:
        return Finding(
            "torch",
            Verdict.ABSENT,
            "not installed",
            "PyTorch jobs cannot run",
            _pip("taskd[torch]"),
        )
    remedy = _pip("taskd[torch]")
    support = judge(found)
    if support not in (Support.TESTED, Support.NEWER):
        because = f"`taskd run` refuses this version: TaskD supports {supported_torch()}"
        return Finding("torch", Verdict.LIMITED, found, because, remedy)
    if problem := torch_check.find_problem():
        who = "`taskd run`" if support is Support.NEWER else "`taskd.torch.init()`"
        return Finding("torch", Verdict.LIMITED, found, f"{who} refuses it: {problem}", remedy)
    if support is Support.NEWER:
        because = f"newer than the tested versions ({supported_torch()}): it is tried"
        return Finding("torch", Verdict.LIMITED, found, because, remedy)
    return Finding("torch", Verdict.FINE, f"{found}, with the internals that taskd.torch expects")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0]))


def _mspti() -> Finding:
    found = next((path for path in mspti.candidates() if path.is_file()), None)
    if found is not None:
        return Finding("libmspti", Verdict.FINE, str(found))
    because = "profiles of Ascend devices have no device times"
    remedy = "install Ascend's CANN, or set TASKD_PROFILING_MSPTI to the path of the library"
    return Finding("libmspti", Verdict.ABSENT, "not found", because, remedy)


def _port(port: int, user: str) -> Finding:
    try:
        # Without SO_REUSEADDR, bind fails for a minute after the last user has closed the port.
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except OSError as error:
        because = f"{user} cannot listen on it: {error.strerror}"
        return Finding(
            f"port {port}",
            Verdict.LIMITED,
            "in use",
            because,
            f"find the process: ss -ltnp | grep {port}",
        )
    return Finding(f"port {port}", Verdict.FINE, f"free for {user}")


def _tried(subject: str, attempt: Callable[[], str], because: str, basic: bool = True) -> Finding:
    try:
        return Finding(subject, Verdict.FINE, attempt())
    except (OSError, AttributeError) as error:
        verdict = Verdict.BROKEN if basic else Verdict.LIMITED
        return Finding(subject, verdict, str(error), because, "use a newer kernel or runtime")


def _fork() -> str:
    child = os.fork()
    if child == 0:
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError(f"the child process exited with status {status}")
    return "works"


def _pidfd() -> str:
    os.close(os.pidfd_open(os.getpid()))
    return "works"


def _shared_memory() -> str:
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="taskd-doctor-") as file:
        file.write(bytes(4096))
        file.flush()
        there = os.statvfs("/dev/shm")
    free_mib = there.f_bavail * there.f_frsize // 2**20
    if free_mib < SHARED_MEMORY_MIB:
        raise OSError(f"only {free_mib} MiB are free (for a container: --shm-size)")
    return f"works, {free_mib} MiB free"


def _etcd() -> Finding:
    found = etcd_binary.find(etcd_binary.member_settings(), encrypted=True)
    if isinstance(found, NoEtcd):
        because = f"{found.because}: a job of several nodes keeps its state on node 0, and {COST}"
        return Finding("etcd", Verdict.ABSENT, "not usable", because, found.remedy)
    where = f"{found.version}, {found.path}"
    return Finding("etcd", Verdict.FINE, f"{where}: jobs of three nodes or more start it")


def _open_files() -> Finding:
    _, most = resource.getrlimit(
        resource.RLIMIT_NOFILE
    )  # our servers raise the soft limit themselves
    if most == resource.RLIM_INFINITY or most >= OPEN_FILES:
        return Finding("open files", Verdict.FINE, "unlimited" if most < 0 else f"up to {most}")
    because = "the manager of a large job runs out of connections"
    remedy = f"as root, raise the hard limit: ulimit -Hn {OPEN_FILES}, or LimitNOFILE={OPEN_FILES}"
    return Finding("open files", Verdict.LIMITED, f"up to {most}", because, remedy)


def _log_directory() -> Finding:
    chosen, problems = log.settings()
    path = Path(chosen.log_path).absolute()
    remedy = "set TASKD_LOG_PATH to a writable directory"
    if problems:
        because = "; ".join(problems)
        return Finding("log directory", Verdict.LIMITED, str(path), because, "correct the variable")
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if path.is_symlink() or not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        because = "not writable: the log goes to standard error"
        return Finding("log directory", Verdict.LIMITED, str(path), because, remedy)
    return Finding("log directory", Verdict.FINE, str(path))


def _library() -> Finding:
    path = Path(__file__).parent / "python" / "cython_api" / "libs" / "libtaskd.so"
    if path.exists():
        return Finding("libtaskd.so", Verdict.FINE, str(path))
    because = "with the documented LD_PRELOAD line every process prints an error"
    return Finding(
        "libtaskd.so", Verdict.LIMITED, "missing", because, "pip install --force-reinstall taskd"
    )


def _table(findings: list[Finding], works: bool) -> str:
    width = max(len(finding.subject) for finding in findings)
    lines = [f"taskd {__version__} on {platform.platform()}", ""]
    for finding in findings:
        lines.append(f"{finding.verdict:<8} {finding.subject:<{width}}  {finding.value}")
        indent = " " * (8 + 1 + width + 2)
        if finding.because:
            lines.append(f"{indent}{finding.because}")
        if finding.remedy:
            lines.append(f"{indent}-> {finding.remedy}")
    end = "TaskD works here." if works else "TaskD does not work here: see `broken` above."
    return "\n".join([*lines, "", end]) + "\n"
