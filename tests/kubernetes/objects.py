"""Objects that tests create in a real API server, and what their controllers would write."""

from __future__ import annotations

import json

from tests.kubernetes.control_plane import ControlPlane, Json, Refused

MERGE = "application/merge-patch+json"


def crd(kind: str, group: str, version: str, scope: str = "Namespaced") -> Json:
    """Any content is valid: the controllers that the tests play check nothing."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": scope,
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


CRDS = [
    crd("PodGroup", "scheduling.volcano.sh", "v1beta1"),
    crd("AscendJob", "mindxdl.gitee.com", "v1"),
    crd("Job", "batch.volcano.sh", "v1alpha1"),
    crd("JobSet", "jobset.x-k8s.io", "v1alpha2"),
    crd("ClusterTrainingRuntime", "trainer.kubeflow.org", "v1alpha1", "Cluster"),
    crd("TrainJob", "trainer.kubeflow.org", "v1alpha1"),
]


def namespace(plane: ControlPlane, name: str) -> None:
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


def pod_annotations(index: int, per_pod: int, group: str) -> dict[str, str]:
    """What operator, device plugin and scheduler write about the pod of this index."""
    ranks = range(index * per_pod, (index + 1) * per_pod)
    devices = [{"device_id": str(i), "rank_id": str(rank)} for i, rank in enumerate(ranks)]
    return {
        "hccl/rankIndex": str(index),
        "scheduling.k8s.io/group-name": group,
        "ascend.kubectl.kubernetes.io/ascend-910-configuration": json.dumps({"devices": devices}),
    }


class TrainingJob:
    """A job, its PodGroup and pods, as Ascend's operator and the scheduler make them."""

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        pods: int = 2,
        per_pod: int = 2,
        kind: str = "AscendJob",
        version: str = "mindxdl.gitee.com/v1",
        **labels: str,
    ) -> None:
        self.plane, self.name, self.per_pod = plane, name, per_pod
        self.kind, self.version = kind, version
        job = plane.apply(
            {
                "apiVersion": version,
                "kind": kind,
                "metadata": {"name": name, "namespace": "team"},
            }
        )
        self.uid: str = job["metadata"]["uid"]
        plane.apply(
            {
                "apiVersion": "scheduling.volcano.sh/v1beta1",
                "kind": "PodGroup",
                "metadata": {
                    "name": self.group,
                    "namespace": "team",
                    "ownerReferences": [self.owner(self.kind, self.version)],
                    "labels": {
                        "process-recover-enable": "on",
                        "framework": "pytorch",
                        **labels,
                    },
                    "annotations": {"recover-strategy": "retry,recover,dump,exit"},
                },
                "status": {"phase": "Running"},
            }
        )
        for index in range(pods):
            self.pod(index)

    @property
    def group(self) -> str:
        return f"{self.name}-{self.uid}"

    def owner(self, kind: str, version: str) -> Json:
        about = {"apiVersion": version, "kind": kind, "name": self.name, "uid": self.uid}
        return {**about, "controller": True}

    def pod_body(self, index: int, node: str = "") -> Json:
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": f"{self.name}-worker-{index}",
                "namespace": "team",
                "ownerReferences": [self.owner(self.kind, self.version)],
                "annotations": pod_annotations(index, self.per_pod, self.group),
            },
            "spec": {
                "nodeName": node,
                "automountServiceAccountToken": False,
                "containers": [{"name": "ascend", "image": "train"}],
                "terminationGracePeriodSeconds": 0,
                "tolerations": [{"operator": "Exists"}],
            },
        }

    def pod(self, index: int, node: str = "") -> Json:
        node = node or f"node-{index}"
        # The controller manager deletes pods whose node does not exist, after 40 s.
        self.plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
        body = self.pod_body(index, node)
        made = self.plane.request("POST", "api/v1/namespaces/team/pods", body)
        name = made["metadata"]["name"]
        path = f"api/v1/namespaces/team/pods/{name}/status"
        return self.plane.request("PATCH", path, {"status": {"phase": "Running"}}, MERGE)

    def delete_pod(self, index: int) -> None:
        name = f"{self.name}-worker-{index}"
        self.plane.request(
            "DELETE", f"api/v1/namespaces/team/pods/{name}", {"gracePeriodSeconds": 0}
        )

    def pod_group(self) -> Json:
        path = f"apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups/{self.group}"
        return self.plane.request("GET", path)

    def delete(self) -> None:
        path = f"apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups/{self.group}"
        self.plane.request("DELETE", path)


def config_map(
    plane: ControlPlane, name: str, data: dict[str, str], namespace: str = "team", **labels: str
) -> None:
    plane.apply(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace, "labels": labels},
            "data": data,
        }
    )


def exists(plane: ControlPlane, path: str) -> bool:
    try:
        plane.request("GET", path)
    except Refused as error:
        if error.code != 404:
            raise
        return False
    return True


def remove_records(plane: ControlPlane) -> None:
    """What clusterd has written about jobs."""
    selector = "labelSelector=taskd/record%3Djob"
    plane.request("DELETE", f"api/v1/namespaces/mindx-dl/configmaps?{selector}")
