"""Replicas of clusterd as processes, each with the rights of a service account."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from tests.integration.clusterd.client import Client
from tests.kubernetes.control_plane import ControlPlane, Json, end, eventually, free_ports, spawn

LEADS = "clusterd listens on port"


@dataclass
class Replica:
    running: subprocess.Popen[bytes]
    log: Path
    port: int
    probes: int

    @property
    def leads(self) -> bool:
        return LEADS in self.log.read_text()

    def wait_for(self, text: str, wait_s: float = 60.0) -> None:
        def seen() -> bool:
            assert self.running.poll() is None or text in self.log.read_text(), self.log.read_text()
            return text in self.log.read_text()

        eventually(seen, wait_s, f"no {text!r} in {self.log}")

    @asynccontextmanager
    async def client(self, job: str) -> AsyncIterator[Client]:
        async with aio.insecure_channel(f"127.0.0.1:{self.port}") as channel:
            yield Client(channel, job=job)


@contextmanager
def replica(
    plane: ControlPlane, name: str, token: str = "", pod: str = "", *options: str, url: str = ""
) -> Iterator[Replica]:
    """`url`: a proxy instead of the API server."""
    port, probes = free_ports(2)
    log = plane.folder / f"{name}.log"
    log.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "taskd", "clusterd", "--cluster", "kubernetes"),
        *("--listen", f"127.0.0.1:{port}", "--probes", f"127.0.0.1:{probes}", *options),
    ]
    env = {
        "KUBECONFIG": str(plane.kubeconfig(name, token, url)),
        "POD_NAME": pod,
        "POD_NAMESPACE": "mindx-dl",
    }
    running = spawn(log, command, env)
    try:
        yield Replica(running, log, port, probes)
    finally:
        end(running)


def own_pod(plane: ControlPlane, name: str, **labels: str) -> None:
    """The pod that a replica takes for its own. No node runs it."""
    plane.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "mindx-dl", "labels": labels},
            "spec": {
                "containers": [{"name": "clusterd", "image": "taskd"}],
                "schedulerName": "none",
            },
        }
    )


def labels_of(plane: ControlPlane, pod: str) -> Json:
    about: Json = plane.request("GET", f"api/v1/namespaces/mindx-dl/pods/{pod}")["metadata"]
    return dict(about.get("labels") or {})
