"""One member of the job's etcd as a child process: it dies with its launcher, and leaves nothing.

Its data is in a folder of this launcher, in shared memory unless that is too small. A launcher
that is started again begins with an empty one: its node joins as a new member, and the former one
is removed.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from taskd.agent.etcd_member.etcd_binary import EtcdBinary
from taskd.agent.etcd_member.job_authority import Certificate
from taskd.agent.process_lifetime import program_with_parent
from taskd.agent.run.supervisor import exit_of

log = logging.getLogger(__name__)

HEARTBEAT_MS, ELECTION_MS = 50, 500
QUOTA_BYTES = 64 * 2**20
RESTART_S = 0.2
REPLACED = "replaced"
PANIC = re.compile(r'panic: |\{"level":"(panic|fatal)"')
OPTIONS = (
    f"--heartbeat-interval={HEARTBEAT_MS}",
    f"--election-timeout={ELECTION_MS}",
    # etcd refuses changes for 5 s after each new member. `core/etcd_members.py` decides instead:
    # a new member has no vote until it has all data, so it cannot block the others.
    "--strict-reconfig-check=false",
    "--pre-vote=true",  # a member that was cut off does not end the term of the others' leader
    "--snapshot-count=2000",
    "--max-snapshots=1",
    "--max-wals=1",
    "--auto-compaction-mode=revision",
    "--auto-compaction-retention=1000",
    f"--quota-backend-bytes={QUOTA_BYTES}",
    "--enable-grpc-gateway=false",
    "--logger=zap",
    "--log-level=error",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberPlan:
    """Everything about a member that stays the same while its launcher lives."""

    binary: EtcdBinary
    name: str
    host: str
    """By which the other nodes reach this one."""
    client_port: int
    peer_port: int
    certificate: Certificate | None
    """None: without encryption, as the whole job."""
    cluster_token: str

    @property
    def scheme(self) -> str:
        return "http" if self.certificate is None else "https"

    @property
    def peer_url(self) -> str:
        return f"{self.scheme}://{_bracketed(self.host)}:{self.peer_port}"

    @property
    def client_url(self) -> str:
        return f"{self.scheme}://{self.client}"

    @property
    def client(self) -> str:
        return f"{_bracketed(self.host)}:{self.client_port}"

    def command(self, data: Path, others: Sequence[str], *, alone: bool) -> list[str]:
        """`others` are the peer URLs of the existing members; empty: this one is the first."""
        listen = f"{self.scheme}://{_bracketed(self.host)}"
        cluster = [f"{self.name}={self.peer_url}", *(f"m{n}={u}" for n, u in enumerate(others))]
        return [
            self.binary.path,
            f"--name={self.name}",
            f"--data-dir={data}",
            f"--listen-client-urls={listen}:{self.client_port}",
            f"--listen-peer-urls={listen}:{self.peer_port}",
            f"--advertise-client-urls={self.client_url}",
            f"--initial-advertise-peer-urls={self.peer_url}",
            f"--initial-cluster={','.join(cluster)}",
            f"--initial-cluster-state={'existing' if others else 'new'}",
            f"--initial-cluster-token={self.cluster_token}",
            *OPTIONS,
            *(["--force-new-cluster"] if alone else []),
            *([] if self.certificate is None else _tls(self.certificate)),
        ]


@dataclass
class MemberProcess:
    plan: MemberPlan
    folder: Path
    """Removed at the end."""
    restarts: int = 0
    leaves: bool = False
    """It ends by itself when it is removed from the list of members, and is not started again."""
    _others: tuple[str, ...] = ()
    _popen: subprocess.Popen[bytes] | None = None
    _keeping: asyncio.Task[None] | None = None
    _errors: Path = field(init=False)

    def __post_init__(self) -> None:
        self._errors = self.folder / "etcd.log"

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    @property
    def has_data(self) -> bool:
        """It was a member before its keeper was started again."""
        return (self.folder / "data").is_dir()

    @property
    def was_replaced(self) -> bool:
        """It was a member and has been removed: it can only join again."""
        return (self.folder / REPLACED).exists()

    async def start(self, others: Sequence[str] = ()) -> None:
        """Start it, and start it again with its data whenever it dies."""
        self._others = tuple(others)
        self._start(alone=False)
        self._keeping = asyncio.create_task(self._keep(), name="etcd")

    async def continue_alone(self) -> None:
        """Make a cluster of this member alone, with its data."""
        await self._end()
        self._start(alone=True)
        self._keeping = asyncio.create_task(self._keep(), name="etcd")

    async def stop(self) -> None:
        """End it and forget its data: it can join again as a new member."""
        (self.folder / REPLACED).touch()
        await self._end()
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    async def close(self) -> None:
        await self._end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, *, alone: bool) -> None:
        command = self.plan.command(self.folder / "data", self._others, alone=alone)
        with self._errors.open("ab") as errors:
            self._popen = subprocess.Popen(
                program_with_parent(*command),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                process_group=0,
            )

    async def _keep(self) -> None:
        said: tuple[int, str] | None = None
        while True:
            assert self._popen is not None
            ended = await exit_of(self._popen), self._last_error()
            if self.leaves:
                return
            if ended != said:  # a member that was removed ends at once, again and again
                log.warning("etcd exited: code=%s; starting it again: %s", *ended)
            said = ended
            await asyncio.sleep(RESTART_S)
            self.restarts += 1
            self._start(alone=False)

    async def _end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._popen is None:
            return
        self._popen.send_signal(signal.SIGCONT)
        self._popen.terminate()
        try:
            async with asyncio.timeout(2.0):
                await exit_of(self._popen)
        except TimeoutError:
            self._popen.kill()
            await exit_of(self._popen)
        self._popen = None

    def _last_error(self) -> str:
        try:
            lines = self._errors.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        telling = [line for line in lines if PANIC.match(line) or '"error"' in line]
        panics = [line for line in telling if PANIC.match(line)]
        return "".join((panics or telling)[-1:])[:500]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _tls(files: Certificate) -> list[str]:
    return [
        f"--cert-file={files.crt}",
        f"--key-file={files.key}",
        f"--trusted-ca-file={files.ca}",
        "--client-cert-auth",
        f"--peer-cert-file={files.crt}",
        f"--peer-key-file={files.key}",
        f"--peer-trusted-ca-file={files.ca}",
        "--peer-client-cert-auth",
    ]
