"""clusterd on a real API server that holds 5,000 pods of 100 jobs on 1,000 nodes.

Controllers do not run: pods and nodes stay as they are created. A decision is measured where a job
waits for one pod to disappear (the end of a hot switch): from the deletion's event on a bare watch
of this process to the order on the stream of the job's manager.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import psutil

from taskd.core.election import ElectionConfig
from tests import ROOT
from tests.bench.rows import Row
from tests.integration.clusterd.objects import device_fault, device_info
from tests.kubernetes.control_plane import ControlPlane, Json, control_plane, end, eventually
from tests.kubernetes.objects import CRDS, MERGE, TrainingJob, namespace
from tests.kubernetes.replicas import Replica, replica
from tests.kubernetes.watching import Watcher

JOBS, PODS_PER_JOB, NODES = 100, 50, 1000
FEW_JOBS = 1
WATCHED_S = 60.0
"""How long requests are counted: one life of a watch."""
QUIET_S = 3.0
ROUNDS = 10
SWITCHED = {"subHealthyStrategy": "hotSwitch"}
AT_ONCE = 16
USER = "clusterd"
PADDING = [{"name": f"SETTING_{number}", "value": "x" * 60} for number in range(30)]
"""Brings a pod to the usual size of some kilobytes."""


class Connections:
    """One connection to the API server per thread, kept open."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self._local = plane, threading.local()

    def request(self, method: str, path: str, body: Json, kind: str = "application/json") -> None:
        if not hasattr(self._local, "connection"):
            context = ssl.create_default_context(cafile=str(self._plane.ca))
            address = urlsplit(self._plane.url).netloc
            self._local.connection = http.client.HTTPSConnection(address, context=context)
        headers = {"Authorization": f"Bearer {self._plane.token}", "Content-Type": kind}
        self._local.connection.request(method, f"/{path}", json.dumps(body), headers)
        answer = self._local.connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise RuntimeError(f"{method} {path}: {answer.status} {text[:300]!r}")


def fill(plane: ControlPlane, jobs: Iterable[int]) -> dict[int, TrainingJob]:
    """Jobs with all their pods, running."""
    connections = Connections(plane)

    def make(number: int) -> TrainingJob:
        job = TrainingJob(plane, f"job-{number}", pods=0, per_pod=1, **SWITCHED)
        for index in range(PODS_PER_JOB):
            node = f"node-{(number * PODS_PER_JOB + index) % NODES}"
            body = job.pod_body(index, node)
            body["spec"]["containers"][0]["env"] = PADDING
            connections.request("POST", "api/v1/namespaces/team/pods", body)
            path = f"api/v1/namespaces/team/pods/{body['metadata']['name']}/status"
            connections.request("PATCH", path, {"status": {"phase": "Running"}}, MERGE)
        return job

    with ThreadPoolExecutor(AT_ONCE) as pool:
        numbers = list(jobs)
        return dict(zip(numbers, pool.map(make, numbers), strict=True))


def requests_of(plane: ControlPlane, user: str) -> list[Json]:
    log = (plane.folder / "audit.log").read_text()
    return [json.loads(line) for line in log.splitlines() if f'"username":"{user}"' in line]


def requests_in(plane: ControlPlane, seconds: float) -> list[Json]:
    before = len(requests_of(plane, USER))
    threading.Event().wait(seconds)
    return requests_of(plane, USER)[before:]


def steady_requests(plane: ControlPlane) -> int:
    """Requests of a leader that has nothing to do, once it has written the summaries of all jobs.

    The audit log has a watch when it ends.
    """

    def quiet() -> bool:
        written = {request["objectRef"]["resource"] for request in requests_in(plane, QUIET_S)}
        return written <= {"leases"}

    with replica(plane, "steady", USER) as one:
        one.wait_for("clusterd listens on port", 300.0)
        eventually(quiet, 300.0)
        return len(requests_in(plane, WATCHED_S))


def restart_requests(plane: ControlPlane) -> int:
    """Writes to the objects of jobs by a leader that finds them as another one has left them."""
    before = len(requests_of(plane, USER))
    with replica(plane, "again", USER) as one:
        one.wait_for("clusterd listens on port", 300.0)
        requests_in(plane, QUIET_S)
        found = requests_of(plane, USER)[before:]
    return sum(
        request["verb"] in ("create", "patch", "update")
        and request["objectRef"]["resource"] == "configmaps"
        for request in found
    )


def sync_s(one: Replica, started_at: float) -> float:
    one.wait_for("in sync with the cluster", 300.0)
    return time.monotonic() - started_at


class Deletions:
    """When the bare watch of this process has seen a pod disappear."""

    def __init__(self, plane: ControlPlane) -> None:
        self.seen: queue.Queue[tuple[str, float]] = queue.Queue()
        self._watcher = Watcher(plane, "api/v1/namespaces/team/pods", self._changed)

    def _changed(self, body: Json, gone: bool) -> None:
        if gone:
            self.seen.put((body["metadata"]["name"], time.monotonic()))

    def close(self) -> None:
        self._watcher.stop()


async def decision_s(one: Replica, job: TrainingJob, deletions: Deletions) -> tuple[float, float]:
    """(bare watch latency, time from the deletion to the order), both from before the request."""
    plane, victim = job.plane, f"{job.name}-worker-1"
    async with one.client(job.uid) as client:
        await client.join()
        signals = await client.subscribe()
        body = job.pod_body(1, "")
        node = (await _get(plane, victim))["spec"]["nodeName"]
        await asyncio.to_thread(_report_fault, plane, node)
        await signals.next("hot-switch")
        await _until(plane, victim, "needOperatorOpe", "create")
        body["metadata"]["name"] = f"{job.name}-backup"
        body["metadata"]["annotations"] |= {"podType": "backup", "inHotSwitchFlow": "true"}
        body["spec"]["nodeName"] = "spare"
        await asyncio.to_thread(plane.request, "POST", "api/v1/namespaces/team/pods", body)
        running = f"api/v1/namespaces/team/pods/{job.name}-backup/status"
        await asyncio.to_thread(
            plane.request, "PATCH", running, {"status": {"phase": "Running"}}, MERGE
        )
        await signals.next("hot-switch")
        await client.offer("migration")
        await _until(plane, victim, "needVolcanoOpe", "delete")
        order = asyncio.ensure_future(_timed(signals.next("changeStrategy")))
        path, now = f"api/v1/namespaces/team/pods/{victim}", {"gracePeriodSeconds": 0}
        asked_at = time.monotonic()
        await asyncio.to_thread(plane.request, "DELETE", path, now)
        ordered_at = await order
        while True:
            name, seen_at = await asyncio.to_thread(deletions.seen.get, True, 60.0)
            if name == victim:
                return seen_at - asked_at, ordered_at - asked_at


async def _timed(awaited: object) -> float:
    await awaited  # type: ignore[misc]
    return time.monotonic()


def _report_fault(plane: ControlPlane, node: str) -> None:
    metadata = {"name": f"mindx-dl-deviceinfo-{node}", "namespace": "kube-system"}
    data = {"DeviceInfoCfg": device_info([device_fault("80E18005", "SubHealthFault", 0)])}
    plane.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


async def _get(plane: ControlPlane, pod: str) -> Json:
    return await asyncio.to_thread(plane.request, "GET", f"api/v1/namespaces/team/pods/{pod}")


async def _until(plane: ControlPlane, pod: str, key: str, value: str) -> None:
    def written() -> bool:
        found = plane.request("GET", f"api/v1/namespaces/team/pods/{pod}")
        return bool(found["metadata"]["annotations"].get(key) == value)

    await asyncio.to_thread(eventually, written)


async def takeover(first: Replica, second: Replica) -> tuple[float, int]:
    """The leader is killed in a round: seconds until the next one orders, and incidents then."""
    async with first.client("taken-over") as client:
        await client.declare("retry", "recover", "dump")
        await client.join()
        signals = await client.subscribe()
        assert await client.fault(1) == 0
        stop = await signals.next("stopTrain")
    os.kill(first.running.pid, signal.SIGKILL)
    killed_at = time.monotonic()
    await asyncio.to_thread(second.wait_for, "clusterd listens on port", 300.0)
    async with second.client("taken-over") as client:
        signals = await client.subscribe()
        again = await signals.next("stopTrain")
        took = time.monotonic() - killed_at
        assert again.uuid == stop.uuid, "the same decision, not another one"
        return took, (await client.status()).line.incident


def assets() -> Path:
    found = subprocess.run(
        [ROOT / "tools/kubernetes.sh"], stdout=subprocess.PIPE, text=True, check=True
    )
    return Path(found.stdout.strip().splitlines()[-1])


def measure() -> list[Row]:
    with (
        TemporaryDirectory(dir=ROOT, prefix=".bench-") as name,
        control_plane(assets(), Path(name), controllers=False, users=[USER]) as plane,
    ):
        for crd in CRDS:
            plane.apply(crd)
        for crd in CRDS:
            eventually(lambda crd=crd: _served(plane, crd))
        for space in ("mindx-dl", "cluster-system", "team"):
            namespace(plane, space)
        fill(plane, range(FEW_JOBS))
        few = steady_requests(plane)
        connections = Connections(plane)
        for number in range(NODES):
            node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"node-{number}"}}
            connections.request("POST", "api/v1/nodes", node)
        jobs = fill(plane, range(FEW_JOBS, JOBS))
        many = steady_requests(plane)
        again = restart_requests(plane)
        return [*_with_leader(plane, jobs), _steady_row(few, many), _restart_row(again)]


def _with_leader(plane: ControlPlane, jobs: dict[int, TrainingJob]) -> list[Row]:
    began = time.monotonic()
    with replica(plane, "first", USER) as first:
        synced = sync_s(first, began)
        first.wait_for("clusterd listens on port", 300.0)
        deletions = Deletions(plane)
        measured = [
            asyncio.run(decision_s(first, jobs[number], deletions))
            for number in list(jobs)[:ROUNDS]
        ]
        deletions.close()
        memory = psutil.Process(first.running.pid).memory_info().rss / 2**20
        with replica(plane, "second", USER) as second:
            second.wait_for("waiting for the lease", 300.0)
            took, incidents = asyncio.run(takeover(first, second))
            end(second.running)
    bare = median(watch for watch, _ in measured)
    over = median(ordered - watch for watch, ordered in measured)
    lease = ElectionConfig().duration_s
    return [
        Row(
            f"in sync after the start, {JOBS * PODS_PER_JOB} pods of {JOBS} jobs, {NODES} nodes",
            f"{synced:.1f} s",
            "10 s",
            synced / 10,
            1.0,
        ),
        Row("memory of the leader then", f"{memory:.0f} MiB", "300 MiB", memory / 300, 1.0),
        Row(
            "one pod deletion → order read by the manager, over a bare watch",
            f"{over * 1e3:.0f} ms (median of {len(measured)})",
            f"50 ms; bare watch {bare * 1e3:.0f} ms",
            over / 0.05,
            1.0,
        ),
        Row(
            "leader killed in a round → the next one repeats its order; "
            f"incidents: {incidents}, the same order",
            f"{took:.1f} s",
            f"lease of {lease:g} s + 2 s",
            took / (lease + 2) if incidents == 1 else float("inf"),
            1.0,
        ),
    ]


def _steady_row(few: int, many: int) -> Row:
    pods = PODS_PER_JOB
    return Row(
        f"requests of a leader in {WATCHED_S:g} s, nothing happens: {JOBS * pods} pods",
        f"{many}",
        f"{FEW_JOBS * pods} pods: {few}",
        many / few,
        1.2,
    )


def _restart_row(writes: int) -> Row:
    return Row(
        f"writes of the next leader to the summaries of {JOBS} unchanged jobs",
        f"{writes}",
        "none",
        float(writes),
        0.0,
    )


def _served(plane: ControlPlane, crd: Json) -> bool:
    path = f"apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}"
    conditions = plane.request("GET", path).get("status", {}).get("conditions") or ()
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


if __name__ == "__main__":
    for row in measure():
        print(row, flush=True)
    sys.exit(0)
