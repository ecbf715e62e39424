"""Plays the parts of Ascend and Volcano that describe a StatefulSet's pods to clusterd.

Volcano makes a PodGroup for the owner of the pods, the operator numbers the pods, and the device
plugin writes the devices of each. A node with a broken device gets no more pods.
"""

from __future__ import annotations

import json
from contextlib import suppress

from tests.integration.clusterd.objects import checksum
from tests.kubernetes.control_plane import ControlPlane, Json, Refused
from tests.kubernetes.objects import MERGE, config_map, pod_annotations
from tests.kubernetes.watching import Watcher


class AscendParts:
    def __init__(self, plane: ControlPlane, stateful: Json, per_pod: int, strategies: str) -> None:
        about = stateful["metadata"]
        self._plane, self._per_pod, self._namespace = plane, per_pod, about["namespace"]
        self.uid: str = about["uid"]
        """Of the StatefulSet: the id of the job."""
        self._group = f"podgroup-{self.uid}"
        owner = {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": about["name"]}
        plane.apply(
            {
                "apiVersion": "scheduling.volcano.sh/v1beta1",
                "kind": "PodGroup",
                "metadata": {
                    "name": self._group,
                    "namespace": self._namespace,
                    "ownerReferences": [{**owner, "uid": self.uid, "controller": True}],
                    "labels": {"process-recover-enable": "on", "framework": "pytorch"},
                    "annotations": {"recover-strategy": strategies},
                },
                "status": {"phase": "Running"},
            }
        )
        config_map(plane, f"reset-config-{about['name']}", {"reset.json": "{}"}, self._namespace)
        path = f"api/v1/namespaces/{self._namespace}/pods"
        self._watcher = Watcher(plane, path, self._pod_changed)

    def close(self) -> None:
        self._watcher.stop()

    def _pod_changed(self, pod: Json, gone: bool) -> None:
        about = pod["metadata"]
        owners = [owner["uid"] for owner in about.get("ownerReferences") or ()]
        if gone or self.uid not in owners or not pod["spec"].get("nodeName"):
            return
        index = int(about["name"].rpartition("-")[2])
        written = pod_annotations(index, self._per_pod, self._group)
        if written.items() <= (about.get("annotations") or {}).items():
            return
        path = f"api/v1/namespaces/{self._namespace}/pods/{about['name']}"
        patch = {"metadata": {"uid": about["uid"], "annotations": written}}
        with suppress(Refused):  # it has gone meanwhile, and perhaps another one has its name
            self._plane.request("PATCH", path, patch, MERGE)

    def device_breaks(self, node: str) -> None:
        node_path = f"api/v1/nodes/{node}"
        self._plane.request("PATCH", node_path, {"spec": {"unschedulable": True}}, MERGE)
        device_report(self._plane, node, "SeparateNPU")


def device_report(plane: ControlPlane, node: str, level: str) -> None:
    entry = {"npu_name": "Ascend910-0", "fault_level": level, "fault_code": "80E18005"}
    lists = {"huawei.com/Ascend910": "", "huawei.com/Ascend910-Fault": json.dumps([entry])}
    devices = {"DeviceList": lists, "UpdateTime": 1_790_000_000}
    report = {"DeviceInfo": devices, "SuperPodID": -1, "CheckCode": checksum(devices)}
    config_map(
        plane,
        f"mindx-dl-deviceinfo-{node}",
        {"DeviceInfoCfg": json.dumps(report)},
        "kube-system",
        **{"mx-consumer-cim": "true"},
    )
