"""A cluster that runs pods: test nodes on one network, and what the manifests expect to find."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.kubernetes.container import Image
from tests.kubernetes.control_plane import ControlPlane, Json, Refused, eventually, object_path
from tests.kubernetes.node import Node, PodRun
from tests.kubernetes.objects import exists
from tests.kubernetes.pod_network import PodNetwork

READY_S = 300.0
IMAGES = ("training", "taskd", "etcd")
OWNERS_OF_PODS = ("StatefulSet", "Deployment")


@dataclass
class Site:
    plane: ControlPlane
    network: PodNetwork
    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)
    _applied: list[Json] = field(default_factory=list)

    def add_node(self, name: str, pods: int) -> Node:
        folder = self.folder / f"{name}-{len(self.nodes)}"
        images = {image: Image(self.folder / image) for image in IMAGES}
        node = Node(self.plane, self.network, name, images, folder, pods)
        self.nodes[name] = node.__enter__()
        eventually(lambda: not self._node(name)["spec"].get("taints"), READY_S)
        return node

    def lose_node(self, name: str) -> list[str]:
        """Its power fails, and an operator or the cloud removes it. The names of its pods."""
        node = self.nodes.pop(name)
        names = [run.name_of_pod for run in node.runs.values() if not run.ending]
        node.lose()
        self.plane.request("DELETE", f"api/v1/nodes/{name}")
        return names

    def all_runs(self) -> list[PodRun]:
        """Of all pods that ran on the present nodes."""
        return [run for node in self.nodes.values() for run in list(node.runs.values())]

    def _node(self, name: str) -> Json:
        return self.plane.request("GET", f"api/v1/nodes/{name}")

    def find(self, name: str) -> PodRun | None:
        for node in self.nodes.values():
            run = node.pod(name)
            if run is not None and run.container is not None:
                return run
        return None

    def pod(self, name: str, other_than: str = "") -> PodRun:
        """The running pod of that name; another incarnation than the one with that uid."""

        def there() -> PodRun | None:
            run = self.find(name)
            return run if run is not None and run.uid != other_than else None

        run: PodRun = eventually(there, READY_S, f"pod {name} does not run; see {self.folder}")
        return run

    def apply(self, bodies: list[Json]) -> None:
        self._applied += bodies
        for body in bodies:
            self.plane.apply(body)

    def remove_leftovers(self) -> None:
        """Of a test that has failed: its pods would run in the next one. The nodes are lost."""
        paths = [object_path(body) for body in self._applied if body["kind"] in OWNERS_OF_PODS]
        for path in paths:
            with suppress(Refused):
                self.plane.request("DELETE", path, {"propagationPolicy": "Foreground"})

        def gone() -> bool:
            for pod in self._pods_here():
                with suppress(Refused):
                    self.plane.request("DELETE", object_path(pod), {"gracePeriodSeconds": 0})
            return not any(exists(self.plane, path) for path in paths)

        eventually(gone, READY_S)

    def remove(self, bodies: list[Json]) -> None:
        """Also waits until their pods have gone."""
        for body in bodies:
            with suppress(Refused):
                self.plane.request("DELETE", object_path(body), {"propagationPolicy": "Background"})
        eventually(lambda: not self._pods_here(), READY_S)

    def _pods_here(self) -> list[Json]:
        return [
            {"apiVersion": "v1", "kind": "Pod", **pod}
            for pod in self.plane.request("GET", "api/v1/pods")["items"]
            if pod["spec"].get("nodeName") in self.nodes
        ]

    def secret(self, namespace: str, name: str, content: dict[str, bytes]) -> None:
        data = {key: b64encode(value).decode() for key, value in content.items()}
        self.plane.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": name, "namespace": namespace},
                "data": data,
            }
        )

    def claim(self, name: str) -> Path:
        """A volume that all pods of the namespace `team` can mount; its directory."""
        path = f"api/v1/namespaces/team/persistentvolumeclaims/{name}"
        if exists(self.plane, path):
            volume = self.plane.request("GET", path)["spec"]["volumeName"]
            found = self.plane.request("GET", f"api/v1/persistentvolumes/{volume}")
            return Path(found["spec"]["hostPath"]["path"])
        folder = self.folder / name
        folder.mkdir()
        folder.chmod(0o777)
        size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
        volume = f"{name}-{self.folder.name}".lower().replace("_", "-")
        self.plane.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": volume},
                "spec": {
                    "capacity": size,
                    "accessModes": modes,
                    "hostPath": {"path": str(folder)},
                    "claimRef": {"namespace": "team", "name": name},
                },
            }
        )
        claim: Json = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": "team"},
            "spec": {
                "accessModes": modes,
                "resources": {"requests": size},
                "storageClassName": "",
                "volumeName": volume,
            },
        }
        self.plane.apply(claim)
        eventually(lambda: self.plane.request("GET", path)["status"].get("phase") == "Bound")
        return folder


@contextmanager
def site(plane: ControlPlane, folder: Path) -> Iterator[Site]:
    for image in IMAGES:
        (folder / image).mkdir(parents=True)
    made = Site(plane, PodNetwork(plane), folder)
    try:
        yield made
    finally:
        for node in made.nodes.values():
            node.lose()
        made.remove_leftovers()
        for name in made.nodes:
            with suppress(Refused):
                plane.request("DELETE", f"api/v1/nodes/{name}")
        made.network.close()


def step_of(run: PodRun) -> int:
    """The newest step that a rank of this pod has reported."""
    return max((int(step) for step in re.findall(r"step (\d+)", run.text)), default=-1)


def at_step(run: PodRun, step: int, wait_s: float = 240.0) -> None:
    eventually(lambda: step_of(run) >= step, wait_s, f"step {step} is not in {run.log}")


def trains_on(run: PodRun, steps: int = 3) -> None:
    """More steps than were under way: after a fault this means that it is repaired."""
    at_step(run, step_of(run) + steps)


def rank_pid(run: PodRun, rank: int) -> int:
    """The process of this rank, as the machine sees it; 0: it does not run now."""
    assert run.container is not None
    for pid in run.container.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == f"taskd:rank{rank}":
                return pid
    return 0
