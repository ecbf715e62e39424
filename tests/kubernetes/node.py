"""A node for tests: plays the kubelet. Runs the pods that the scheduler binds to it.

One container per pod, as processes in namespaces of their own. Images are not needed: a container
runs with this project's Python. Exit codes, restart policies, graceful deletion, readiness probes,
mounted ConfigMaps and Secrets work as with a kubelet.
"""

from __future__ import annotations

import http.client
import signal
import threading
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kubernetes.container import Container, Image, start
from tests.kubernetes.control_plane import ControlPlane, Json, Refused
from tests.kubernetes.objects import MERGE
from tests.kubernetes.pod_network import PodAddress, PodNetwork, inside
from tests.kubernetes.pod_volumes import Volumes
from tests.kubernetes.watching import Watcher

HEARTBEAT_S = 4.0
PROBE_S = 0.5
LONGEST_BACK_OFF_S = 10.0


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Node:
    def __init__(
        self,
        plane: ControlPlane,
        network: PodNetwork,
        name: str,
        images: dict[str, Image],
        folder: Path,
        pods: int = 10,
    ) -> None:
        self.plane, self.network, self.name = plane, network, name
        self.images, self.folder = images, folder
        self.runs: dict[str, PodRun] = {}
        """By uid."""
        self._pods = pods
        self._lock = threading.Lock()
        self._stop = threading.Event()
        folder.mkdir(parents=True)

    def __enter__(self) -> Self:
        with suppress(Refused):  # it is there already: a node that comes back
            self.plane.request(
                "POST",
                "api/v1/nodes",
                {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self.name}},
            )
        self._report()
        self._heart = threading.Thread(target=self._beat, name=f"node {self.name}", daemon=True)
        self._heart.start()
        fields = f"spec.nodeName={self.name}"
        self._watcher = Watcher(self.plane, "api/v1/pods", self._changed, fields=fields)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lose()

    def lose(self) -> None:
        """As when its power fails: all processes end, and nothing is reported any more."""
        self._stop.set()
        self._watcher.stop()
        self._heart.join()
        for run in list(self.runs.values()):
            run.kill()
        for run in list(self.runs.values()):
            run.join()

    def pod(self, name: str) -> PodRun | None:
        """The newest pod with that host name which is not being deleted."""
        with self._lock:
            runs = list(self.runs.values())
        for run in reversed(runs):
            if run.hostname == name and not run.ending:
                return run
        return None

    def _changed(self, body: Json, gone: bool) -> None:
        uid = body["metadata"]["uid"]
        with self._lock:
            run = self.runs.get(uid)
            if run is None and not gone and body["status"].get("phase") in ("Pending", "Running"):
                run = self.runs[uid] = PodRun(self, body)
                run.start()
        if run is None:
            return
        if gone:
            run.kill()
        elif "deletionTimestamp" in body["metadata"]:
            run.end(body["metadata"].get("deletionGracePeriodSeconds", 0))

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with suppress(OSError, Refused):  # the API server restarts
                self._report()

    def _report(self) -> None:
        size = {"cpu": "64", "memory": "64Gi", "pods": str(self._pods)}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "lastHeartbeatTime": now(),
        }
        status = {"capacity": size, "allocatable": size, "conditions": [ready]}
        self.plane.request("PATCH", f"api/v1/nodes/{self.name}/status", {"status": status}, MERGE)


class PodRun(threading.Thread):
    """The life of one pod on its node."""

    def __init__(self, node: Node, pod: Json) -> None:
        self.name_of_pod: str = pod["metadata"]["name"]
        super().__init__(name=self.name_of_pod, daemon=True)
        self.node, self.body = node, pod
        self.uid: str = pod["metadata"]["uid"]
        self.folder = node.folder / f"{self.name_of_pod}-{self.uid[:8]}"
        self.log = node.folder / f"{self.name_of_pod}-{self.uid[:8]}.log"
        self.container: Container | None = None
        self.address: PodAddress | None = None
        self.restarts = 0
        self._ready = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        """It shall not be started again."""
        self._silent = False
        """It is gone from the API server, or the node is."""
        (self.spec,) = pod["spec"]["containers"]
        assert not pod["spec"].get("initContainers"), "this test node knows no init containers"

    @property
    def ending(self) -> bool:
        return self._ended.is_set()

    @property
    def ready(self) -> bool:
        """Its container runs, and has passed its last probe."""
        return self._ready and not self.ending

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def end(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL later. Repeated calls do nothing."""
        if self._ended.is_set():
            return
        self._ended.set()
        with self._lock:
            if self.container is not None:
                self.container.signal(signal.SIGTERM)
        timer = threading.Timer(grace_s, self._kill_container)
        timer.daemon = True
        timer.start()

    def kill(self) -> None:
        self._silent = True
        self._ended.set()
        self._kill_container()

    def _kill_container(self) -> None:
        with self._lock:
            if self.container is not None:
                self.container.kill()

    def run(self) -> None:
        with ExitStack() as stack:
            self.folder.mkdir()
            self.address = self.node.network.attach()
            stack.callback(self.node.network.detach, self.address)
            volumes = Volumes(self.node.plane, self.body, self.folder)
            stack.callback(volumes.close)
            hosts = self.folder / "hosts"
            own = f"{self.address.ip} {self.hostname}"
            self.node.network.hosts(hosts, self.body["metadata"]["namespace"], own)
            stack.callback(self.node.network.forget, hosts)
            self.body["status"]["podIP"] = self.address.ip
            code = self._run_containers(volumes, hosts, self.address)
            if not self._ended.is_set():
                self._report("Failed" if code else "Succeeded", _terminated(code))
                self._ended.wait()
            self._confirm()

    def _run_containers(self, volumes: Volumes, hosts: Path, address: PodAddress) -> int:
        policy = self.body["spec"].get("restartPolicy", "Always")
        code = 0
        while not self._ended.is_set():
            port = str(self.node.plane.port)
            fixed = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
            with self._lock:
                self.container = start(
                    self.spec,
                    image=self.node.images[self.spec["image"]],
                    env=volumes.env(self.spec, **fixed),
                    mounts=[*volumes.mounts(self.spec), (hosts, "/etc/hosts")],
                    address=address,
                    hostname=self.hostname,
                    pod_security=self.body["spec"].get("securityContext") or {},
                    root=self.folder / "root",
                    log=self.log,
                )
            self._ready = "readinessProbe" not in self.spec
            self._report("Running", {"running": {"startedAt": now()}})
            probe = self._probing(address)
            code = self.container.running.wait()
            probe.set()
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                break
            self.restarts += 1
            self._ready = False
            if not self._ended.is_set():
                self._report("Running", {"waiting": {"reason": "CrashLoopBackOff"}})
            self._ended.wait(min(0.5 * 2.0**self.restarts, LONGEST_BACK_OFF_S))
        return code

    @property
    def hostname(self) -> str:
        return str(self.body["spec"].get("hostname") or self.name_of_pod)

    # The readiness probe

    def _probing(self, address: PodAddress) -> threading.Event:
        """Probe in the background until the event is set."""
        stop, get = threading.Event(), (self.spec.get("readinessProbe") or {}).get("httpGet")
        if get is None:
            return stop
        ports = {one.get("name"): one["containerPort"] for one in self.spec.get("ports") or ()}
        port = ports.get(get["port"], get["port"])

        def asked() -> bool:
            connection = http.client.HTTPConnection(address.ip, port, timeout=5)
            try:
                connection.request("GET", get["path"])
                return connection.getresponse().status < 400
            except (OSError, http.client.HTTPException):
                return False
            finally:
                connection.close()

        def probe() -> None:
            while not stop.wait(PROBE_S):
                try:
                    ready = inside(address, asked)
                except OSError:
                    return
                if ready != self._ready and not stop.is_set():
                    self._ready = ready
                    self._report("Running", {"running": {"startedAt": now()}})

        threading.Thread(target=probe, name=f"probe {self.name_of_pod}", daemon=True).start()
        return stop

    # Reports to the API server

    def _report(self, phase: str, state: Json) -> None:
        ready = str(self._ready and "running" in state)
        conditions = [
            {"type": kind, "status": value, "lastTransitionTime": now()}
            for kind, value in (
                ("PodScheduled", "True"),
                ("Initialized", "True"),
                ("ContainersReady", ready),
                ("Ready", ready),
            )
        ]
        assert self.address is not None
        container = {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": "none",
            "ready": ready == "True",
            "restartCount": self.restarts,
            "state": state,
        }
        status = {
            "phase": phase,
            "podIP": self.address.ip,
            "podIPs": [{"ip": self.address.ip}],
            "conditions": conditions,
            "containerStatuses": [container],
        }
        body = {"metadata": {"uid": self.uid}, "status": status}
        self._request("PATCH", f"{self._path}/status", body, MERGE)

    def _confirm(self) -> None:
        """The pod's processes have ended: its object may go."""
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        self._request("DELETE", self._path, body)

    @property
    def _path(self) -> str:
        return f"api/v1/namespaces/{self.body['metadata']['namespace']}/pods/{self.name_of_pod}"

    def _request(self, method: str, path: str, body: Json, kind: str = "application/json") -> None:
        """Again until the API server answers. A pod that is gone needs no report."""
        while not self._silent:
            try:
                self.node.plane.request(method, path, body, kind)
            except Refused as error:
                if error.code in (404, 409):
                    return
            except OSError:
                pass
            else:
                return
            threading.Event().wait(0.2)


def _terminated(code: int) -> Json:
    """A process that a signal ended has code 128 + its number."""
    shown = 128 - code if code < 0 else code
    reason = "Completed" if code == 0 else "Error"
    return {"terminated": {"exitCode": shown, "reason": reason, "finishedAt": now()}}
