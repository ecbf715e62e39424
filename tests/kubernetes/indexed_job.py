"""Indexed Jobs on API servers before 1.24, which do not know them: plays their controller.

A pod that fails or is deleted is replaced under its index. A rule of podFailurePolicy about exit
codes ends the Job. On a newer server the real controller does all this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from secrets import token_hex

from tests.kubernetes.control_plane import ControlPlane, Json, Refused, object_path
from tests.kubernetes.watching import Watcher

INDEX = "batch.kubernetes.io/job-completion-index"
REAL = (1, 26)


@contextmanager
def indexed_job(plane: ControlPlane, bodies: list[Json]) -> Iterator[Callable[[], list[Json]]]:
    """Runs it; yields a function that gives the Job's conditions so far."""
    (job,) = (body for body in bodies if body["kind"] == "Job")
    real = plane.version() >= REAL
    for body in bodies:
        if real or body is not job:
            plane.apply(body)
    played = None if real else _PlayedController(plane, job)

    def conditions() -> list[Json]:
        if played is not None:
            return played.conditions
        status = plane.request("GET", object_path(job)).get("status") or {}
        ended = [one for one in status.get("conditions") or () if one["type"] == "Failed"]
        return list(ended)

    try:
        yield conditions
    finally:
        if played is not None:
            played.close()
        for body in bodies:
            with suppress(Refused):
                plane.request("DELETE", object_path(body), {"propagationPolicy": "Background"})


class _PlayedController:
    def __init__(self, plane: ControlPlane, job: Json) -> None:
        self._plane, self._job = plane, job
        self.conditions: list[Json] = []
        self._lock = threading.Lock()
        self._pods: dict[str, int] = {}
        """uid of each pod that counts, and its index."""
        for index in range(job["spec"]["completions"]):
            self._create(index)
        path = f"api/v1/namespaces/{job['metadata']['namespace']}/pods"
        self._watcher = Watcher(plane, path, self._changed)

    def close(self) -> None:
        self._watcher.stop()
        with self._lock:
            self._delete_all()

    def _create(self, index: int) -> None:
        about, template = self._job["metadata"], deepcopy(self._job["spec"]["template"])
        name, spec, about_pod = about["name"], template["spec"], template.get("metadata") or {}
        spec["hostname"] = f"{name}-{index}"
        for container in spec["containers"]:
            given = {"name": "JOB_COMPLETION_INDEX", "value": str(index)}
            container["env"] = [given, *container.get("env", ())]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{name}-{index}-{token_hex(3)}",
                "namespace": about["namespace"],
                "labels": {**about_pod.get("labels", {}), "job-name": name},
                "annotations": {**about_pod.get("annotations", {}), INDEX: str(index)},
            },
            "spec": spec,
        }
        made = self._plane.request("POST", f"api/v1/namespaces/{about['namespace']}/pods", body)
        self._pods[made["metadata"]["uid"]] = index

    def _changed(self, pod: Json, gone: bool) -> None:
        with self._lock:
            uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
            index = self._pods.get(uid)
            if index is None or self.conditions:
                return
            if phase == "Failed" and self._is_final(pod):
                because = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}
                self.conditions.append(because)
                self._delete_all()
            elif phase == "Failed" or (gone and phase != "Succeeded"):
                del self._pods[uid]
                self._create(index)

    def _is_final(self, pod: Json) -> bool:
        (container,) = pod["status"]["containerStatuses"]
        code = container["state"]["terminated"]["exitCode"]
        rules = self._job["spec"].get("podFailurePolicy", {}).get("rules", ())
        return any(
            rule["action"] == "FailJob" and code in rule["onExitCodes"]["values"]
            for rule in rules
            if "onExitCodes" in rule
        )

    def _delete_all(self) -> None:
        where, name = self._job["metadata"]["namespace"], self._job["metadata"]["name"]
        self._plane.request(
            "DELETE", f"api/v1/namespaces/{where}/pods?labelSelector=job-name%3D{name}"
        )
