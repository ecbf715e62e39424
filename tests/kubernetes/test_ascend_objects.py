"""What Ascend's parts exchange through Kubernetes: reports, reset-config, summaries, pods.

The tests play device plugin, operator and scheduler; clusterd runs as a process of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from taskd.clusterd.cluster.interface import ClusterRefused, Key, Kind
from taskd.wire._pb import fault_pb2
from tests.kubernetes.ascend_parts import device_report
from tests.kubernetes.control_plane import ControlPlane, Json, eventually
from tests.kubernetes.objects import TrainingJob, config_map, exists
from tests.kubernetes.replicas import Replica, replica
from tests.kubernetes.test_cluster import connected

OWNERS = {
    "AscendJob": ("AscendJob", "mindxdl.gitee.com/v1"),
    "Volcano Job": ("Job", "batch.volcano.sh/v1alpha1"),
}


def path_of(namespace: str, name: str, kind: str = "configmaps") -> str:
    return f"api/v1/namespaces/{namespace}/{kind}/{name}"


def data_of(plane: ControlPlane, namespace: str, name: str) -> Json:
    path = path_of(namespace, name)
    return dict(plane.request("GET", path)["data"]) if exists(plane, path) else {}


async def until(holds: Callable[[], bool], hint: str) -> None:
    """The requests are blocking: not in the loop of the client."""
    await asyncio.to_thread(eventually, holds, 60.0, hint)


async def repaired(plane: ControlPlane, one: Replica, job: TrainingJob) -> None:
    """A broken device: its pod is deleted by clusterd, and the operator makes another one."""
    node, name = f"{job.name}-node-1", f"{job.name}-worker-1"
    reset = f"reset-config-{job.name}"

    def ranks() -> list[int]:
        content = json.loads(data_of(plane, "team", reset)["reset.json"])
        return [entry["RankId"] for entry in content["RankList"]]

    async with one.client(job.uid) as client:
        await client.join()
        signals = await client.subscribe()
        await asyncio.to_thread(device_report, plane, node, "SeparateNPU")
        signal = await signals.next("preExitProcess")
        assert list(signal.nodeRankIds) == ["1"]
        assert await client.fault(2, 3) == 0
        signal = await signals.next("stopTrain")
        assert await client.stopped(signal.uuid) == 0
        signal = await signals.next("globalFault")
        await until(lambda: ranks() == [2, 3], "the faulty ranks are not in reset-config")
        old = await asyncio.to_thread(plane.request, "GET", path_of("team", name, "pods"))
        assert await client.offer("recover", "dump", uuid=signal.uuid) == 0
        signal = await signals.next("changeStrategy")
        assert signal.changeStrategy == "recover"
        await until(lambda: not exists(plane, path_of("team", name, "pods")), "not deleted")
        new = await asyncio.to_thread(job.pod, 1, f"{job.name}-node-2")
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        await until(lambda: ranks() == [], "reset-config is not cleared")
        assert await client.result("recover", uuid=signal.uuid) == 0
        assert data_of(plane, "team", reset)["restartType"] == "hotReset", "foreign keys are kept"
        get = client.method("/fault.Fault/GetFaultMsgSignal")
        whole = await get(fault_pb2.ClientInfo(), timeout=20)
        assert node in [found.nodeName for found in whole.faultSignal.nodeFaultInfo]


@pytest.mark.parametrize("owner", OWNERS)
def test_broken_device_costs_one_pod_and_all_objects_follow(
    plane: ControlPlane, owner: str
) -> None:
    kind, version = OWNERS[owner]
    job = TrainingJob(plane, kind.lower(), pods=0, kind=kind, version=version)
    for index in range(2):
        job.pod(index, f"{job.name}-node-{index}")
    config_map(plane, f"reset-config-{job.name}", {"reset.json": "{}", "restartType": "hotReset"})
    summary = f"job-summary-{job.name}"
    with replica(plane, job.name, "", "", "--delete-pods") as one:
        one.wait_for("clusterd listens on port")
        eventually(lambda: bool(data_of(plane, "team", summary)), 60.0, "no summary")
        made = plane.request("GET", path_of("team", summary))
        assert made["metadata"]["ownerReferences"][0]["kind"] == kind
        table = json.loads(made["data"]["hccl.json"])
        assert [server["server_name"] for server in table["server_list"]] == [
            f"{job.name}-node-0",
            f"{job.name}-node-1",
        ]

        asyncio.run(repaired(plane, one, job))

        def places() -> list[str]:
            found = json.loads(data_of(plane, "team", summary)["hccl.json"])
            return [server["server_name"] for server in found.get("server_list", [])]

        eventually(lambda: f"{job.name}-node-2" in places(), 60.0, "the summary is old")
        info = json.loads(
            data_of(plane, "mindx-dl", "cluster-info-device-0")["cluster-info-device-0"]
        )
        faults = info[f"mindx-dl-deviceinfo-{job.name}-node-1"]["DeviceList"]
        assert "80E18005" in faults["huawei.com/Ascend910-Fault"]

        job.delete()
        one.wait_for(f"job={job.uid} has ended: the cluster has deleted the job")
        eventually(
            lambda: data_of(plane, "team", summary).get("operator") in (None, "delete"),
            60.0,
            "the summary does not say that the job is gone",
        )
        assert asyncio.run(code_after_the_end(one, job.uid)) == 400


async def code_after_the_end(one: Replica, job: str) -> int:
    async with one.client(job) as client:
        return await client.fault(0)


def test_pod_is_deleted_by_its_uid_only(plane: ControlPlane) -> None:
    job = TrainingJob(plane, "uids", pods=1)
    key = Key(Kind.POD, "team", "uids-worker-0")
    path = path_of("team", key.name, "pods")

    async def main() -> None:
        async with connected(plane) as cluster:
            await cluster.delete(key, "the uid of a former pod")
            assert exists(plane, path)
            with pytest.raises(ClusterRefused):
                await cluster.delete(key)
            found: Any = plane.request("GET", path)
            await cluster.delete(key, found["metadata"]["uid"])
            assert not exists(plane, path)
            await cluster.delete(key, found["metadata"]["uid"])

    asyncio.run(main())
    job.delete()
