"""A real etcd for tests: installed if it is missing, one process per member, ended by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import pytest

from taskd.runtime.address import free_port

PACKAGE = "etcd-server"
SMALL = ("--heartbeat-interval=100", "--election-timeout=1000", "--log-level=error")
CONNECT_RETRIES = 6
"""With growing pauses: 15 s in all."""


@cache
def binary() -> str:
    """The path of etcd. Skips the test if it is missing and cannot be installed."""
    found = shutil.which("etcd")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (("update", "-q"), ("install", "-q", "-y", PACKAGE)):
            lock = "DPkg::Lock::Timeout=300"
            subprocess.run(
                ["apt-get", "-o", lock, *command], env=environment, check=False, timeout=600
            )
        found = shutil.which("etcd")
    if found is None:
        pytest.skip(f"etcd is missing: apt-get install {PACKAGE}")
    return found


@dataclass
class EtcdServer:
    folder: Path
    options: tuple[str, ...] = ()
    scheme: str = "http"
    client: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    peer: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    process: subprocess.Popen[bytes] | None = None
    under: tuple[str, ...] = ()
    """A command that replaces itself by it, such as `ip netns exec`."""

    def start(self) -> None:
        client, peer = f"{self.scheme}://{self.client}", f"http://{self.peer}"
        self.process = subprocess.Popen(
            [
                *self.under,
                *(binary(), "--name=a", f"--data-dir={self.folder}", *SMALL),
                *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                *(f"--initial-cluster=a={peer}", *self.options),
            ],
            stdin=subprocess.DEVNULL,
        )

    def call(self, method: str, *, verify: ssl.SSLContext | bool = True, **body: object) -> str:
        """A call of etcd's JSON interface: its answer, also if it is an error.

        An etcd that has just been started may not listen yet.
        """
        url = f"{self.scheme}://{self.client}/v3/{method}"
        transport = httpx.HTTPTransport(verify=verify, retries=CONNECT_RETRIES)
        with httpx.Client(transport=transport, timeout=30) as client:
            return client.post(url, json=body).text

    def pause(self) -> None:
        """Returns when all its threads are stopped: until then it may still answer a call."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
                self.process.kill()
            self.process.wait()


@contextmanager
def running(folder: Path, *options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    server = EtcdServer(folder, options, scheme)
    server.start()
    try:
        yield server
    finally:
        server.kill()
