"""clusterd's services on real objects: what platforms, operators and other programs ask it for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from grpc import aio

from taskd.wire._pb import config_pb2, fault_pb2, job_pb2, profiling_pb2, pubfault_pb2
from tests.integration.clusterd.client import WAIT_S, Client, Signals, switch
from tests.kubernetes.ascend_parts import device_report
from tests.kubernetes.control_plane import ControlPlane, Json
from tests.kubernetes.objects import MERGE, TrainingJob, config_map, remove_records
from tests.kubernetes.replicas import Replica, replica
from tests.kubernetes.test_ascend_objects import data_of, path_of, until

CODE = "220001001"
CODES = {"publicFaultCode": {"SeparateNPUCodes": [CODE]}, "publicFaultResource": ["CCAE"]}


@pytest.fixture
def no_records_left() -> None:
    """Not between these tests: the leader that they share would find its records gone."""


@pytest.fixture(scope="module")
def leader(plane: ControlPlane) -> Iterator[Replica]:
    codes = plane.folder / "codes.json"
    codes.write_text(json.dumps(CODES))
    with replica(plane, "services", "", "", f"--public-fault-codes={codes}") as one:
        one.wait_for("clusterd listens on port")
        yield one
        assert one.running.poll() is None
        assert "Traceback" not in one.log.read_text()
    remove_records(plane)


async def joined(client: Client) -> Signals:
    """Once clusterd has seen the job's PodGroup and pods."""
    async with asyncio.timeout(WAIT_S):
        while await client.code("Init") != 0:
            pass  # the next answer is another one
    await client.join()
    return await client.subscribe()


async def next_of(stream: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        message = await stream.read()
    assert message is not aio.EOF, "the stream has ended"  # type: ignore[attr-defined]
    return message


def group_path(job: TrainingJob) -> str:
    return f"apis/scheduling.volcano.sh/v1beta1/namespaces/team/podgroups/{job.group}"


async def annotate(job: TrainingJob, **values: str) -> None:
    body = {"metadata": {"annotations": values}}
    await asyncio.to_thread(job.plane.request, "PATCH", group_path(job), body, MERGE)


def notes_of(plane: ControlPlane, pod: str) -> Json:
    found: Json = plane.request("GET", path_of("team", pod, "pods"))["metadata"]["annotations"]
    return found


def test_platform_chooses_confirms_and_ranks_through_annotations(
    plane: ControlPlane, leader: Replica
) -> None:
    job = TrainingJob(plane, "platform")

    async def main() -> None:
        await annotate(job, ProcessRecoverStrategy="")
        async with leader.client(job.uid) as client:
            signals = await joined(client)
            assert await client.fault(3) == 0
            await annotate(job, ProcessRecoverStrategy="recover")
            stop = await signals.next("stopTrain")
            await client.stopped(stop.uuid)
            await until(
                lambda: (
                    job.pod_group()["metadata"]["annotations"].get("ProcessConfirmFault") == "3:1"
                ),
                "the faults are not to be confirmed",
            )
            await annotate(job, ProcessResultFault="2:1")
            announced = await signals.next("globalFault")
            assert {fault.rankId for fault in announced.faultRanks} == {"2", "3"}
            await client.offer("recover", "exit", uuid=stop.uuid)
            await annotate(job, RankTableReady="true")
            assert (await signals.next("changeStrategy")).changeStrategy == "recover"

    asyncio.run(main())
    job.delete()


def test_hot_switch_follows_its_annotations(plane: ControlPlane, leader: Replica) -> None:
    job = TrainingJob(plane, "switched", pods=0, subHealthyStrategy="hotSwitch")
    for index in range(2):
        job.pod(index, f"switched-node-{index}")
    old = "switched-worker-1"

    def backup() -> None:
        body = job.pod_body(1, "switched-node-2")
        body["metadata"]["name"] = "switched-backup"
        body["metadata"]["annotations"] |= {"podType": "backup", "inHotSwitchFlow": "true"}
        plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "switched-node-2"}})
        plane.request("POST", "api/v1/namespaces/team/pods", body)
        path = f"{path_of('team', 'switched-backup', 'pods')}/status"
        plane.request("PATCH", path, {"status": {"phase": "Running"}}, MERGE)

    async def main() -> None:
        async with leader.client(job.uid) as client:
            signals = await joined(client)
            await asyncio.to_thread(device_report, plane, "switched-node-1", "SubHealthFault")
            assert list((await signals.next("hot-switch")).actions) == ["hot switch"]
            await until(
                lambda: notes_of(plane, old).get("needOperatorOpe") == "create",
                "the operator is not asked for a backup",
            )
            await asyncio.to_thread(backup)
            assert list((await signals.next("hot-switch")).actions) == ["new pod running"]
            await client.offer("migration")
            await until(
                lambda: notes_of(plane, old).get("needVolcanoOpe") == "delete",
                "the scheduler is not asked to delete the pod",
            )
            await asyncio.to_thread(job.delete_pod, 1)
            assert (await signals.next("changeStrategy")).changeStrategy == "migration"
            assert await client.result("migration") == 0
            await until(
                lambda: "inHotSwitchFlow" not in notes_of(plane, "switched-backup"),
                "the backup still counts as one",
            )

    asyncio.run(main())
    job.delete()


def public_fault(node: str, now_ms: int) -> Json:
    return {
        "id": "message-1",
        "timestamp": now_ms,
        "version": "1.0",
        "resource": "CCAE",
        "faults": [
            {
                "faultId": "fault-0001",
                "faultType": "Storage",
                "faultCode": CODE,
                "faultTime": now_ms,
                "assertion": "occur",
                "influence": [{"nodeName": node, "deviceIds": [1]}],
            }
        ],
    }


@pytest.mark.parametrize("way", ["call", "config-map"])
def test_public_fault_reaches_the_job_and_subscribers(
    plane: ControlPlane, leader: Replica, way: str
) -> None:
    """NodeD and third parties call PubFault; others write a ConfigMap."""
    name = f"public-{way}"
    job, node = TrainingJob(plane, name, pods=0), f"{name}-node-1"
    for index in range(2):
        job.pod(index, f"{name}-node-{index}")
    fault = public_fault(node, time.time_ns() // 1_000_000)

    async def main() -> None:
        async with leader.client(job.uid) as client:
            signals = await joined(client)
            me = fault_pb2.ClientInfo(jobId=job.uid, role="me")
            answer = await client.method("/fault.Fault/Register")(me, timeout=WAIT_S)
            assert answer.code == 200
            stream = client.method("/fault.Fault/SubscribeFaultMsgSignal")(me)
            if way == "call":
                send = client.method("/PubFault/SendPublicFault")
                request = pubfault_pb2.PublicFaultRequest(**fault)
                assert (await send(request, timeout=WAIT_S)).code == 0
            else:
                data, labels = (
                    {"PublicFault": json.dumps(fault)},
                    {"mc-consumer-publicfault": "true"},
                )
                await asyncio.to_thread(config_map, plane, "storage", data, **labels)
            assert list((await signals.next("preExitProcess")).nodeRankIds) == ["1"]
            while True:
                seen = await next_of(stream)
                if node in [one.nodeName for one in seen.nodeFaultInfo]:
                    break

    asyncio.run(main())
    job.delete()


def test_subscriber_gets_the_summary_of_a_job_until_it_is_gone(
    plane: ControlPlane, leader: Replica
) -> None:
    job = TrainingJob(plane, "summarized")

    async def main() -> None:
        async with leader.client(job.uid) as client:
            register = client.method("/job.Job/Register")
            answer = await register(job_pb2.ClientInfo(role="CCAgent"), timeout=WAIT_S)
            me = job_pb2.ClientInfo(role="CCAgent", clientId=answer.clientId)
            stream = client.method("/job.Job/SubscribeJobSummarySignal")(me)

            async def until_it_says(operator: str) -> Any:
                while True:
                    found = await next_of(stream)
                    if (found.jobId, found.operator) == (job.uid, operator):
                        return found

            await until_it_says("add")
            await asyncio.to_thread(job.delete)
            assert (await until_it_says("delete")).deleteTime

    asyncio.run(main())


def test_rank_table_of_an_inference_job_consists_of_all_its_parts(
    plane: ControlPlane, leader: Replica
) -> None:
    """Coordinator and controller have no devices, and need no controlling owner."""
    labels = {"jobID": "mindie-1"}

    def part(app: str, address: str) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": app, "namespace": "team", "labels": {**labels, "app": app}},
            "spec": {
                "containers": [{"name": "c", "image": "mindie"}],
                "schedulerName": "none",
                "automountServiceAccountToken": False,
            },
        }
        plane.apply(body)
        status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
        plane.request("PATCH", f"{path_of('team', app, 'pods')}/status", status, MERGE)

    def ring(*servers: str) -> None:
        table = {"status": "completed", "server_list": [{"server_id": one} for one in servers]}
        data = {"hccl.json": json.dumps(table)}
        config_map(plane, "rings-config-server-0", data, **labels)

    async def main() -> None:
        async with leader.client("mindie-1") as client:
            me = config_pb2.ClientInfo(jobId="mindie-1", role="controller")
            assert (await client.method("/config.Config/Register")(me, timeout=WAIT_S)).code == 0
            stream = client.method("/config.Config/SubscribeRankTable")(me)
            await stream.initial_metadata()
            await asyncio.to_thread(part, "mindie-ms-coordinator", "10.0.0.1")
            await asyncio.to_thread(part, "mindie-ms-controller", "10.0.0.2")
            await asyncio.to_thread(ring, "s0")
            groups = json.loads((await next_of(stream)).rankTable)["server_group_list"]
            assert [group["server_list"] for group in groups] == [
                [{"server_ip": "10.0.0.1"}],
                [{"server_ip": "10.0.0.2"}],
                [{"server_id": "s0"}],
            ]
            await asyncio.to_thread(ring, "s0", "s1")
            groups = json.loads((await next_of(stream)).rankTable)["server_group_list"]
            assert groups[2]["server_count"] == "2"

    asyncio.run(main())


def test_profiling_switch_is_in_its_config_map_and_foreign_keys_are_kept(
    plane: ControlPlane, leader: Replica
) -> None:
    job = TrainingJob(plane, "traced", pods=0)
    for index in range(2):
        body = job.pod_body(index, f"traced-node-{index}")
        mount = {"name": "trace", "mountPath": "/user/cluster-info/datatrace-config"}
        body["spec"]["containers"][0]["volumeMounts"] = [mount]
        body["spec"]["volumes"] = [{"name": "trace", "configMap": {"name": "data-trace-traced"}}]
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": f"traced-node-{index}"}}
        plane.apply(node)
        plane.request("POST", "api/v1/namespaces/team/pods", body)

    def written() -> Json:
        content: Json = json.loads(
            data_of(plane, "team", "data-trace-traced").get("profilingSwitch", "{}")
        )
        return content

    async def main() -> None:
        async with leader.client(job.uid) as client:
            wanted = profiling_pb2.DataTypeReq(
                jobNsName="team/traced", profilingSwitch=switch(Step="on")
            )
            async with asyncio.timeout(WAIT_S):  # until clusterd has seen the job and its pods
                while "Step" not in await asyncio.to_thread(written):
                    await client.code("ModifyTrainingDataTraceSwitch", wanted)
            assert written()["Step"] == "on"
            path = path_of("team", "data-trace-traced")
            theirs = {"data": {"theirs": "kept"}}
            await asyncio.to_thread(plane.request, "PATCH", path, theirs, MERGE)
            wanted.profilingSwitch.Step = "off"
            assert await client.code("ModifyTrainingDataTraceSwitch", wanted) == 200
            assert written()["Step"] == "off"
            assert data_of(plane, "team", "data-trace-traced")["theirs"] == "kept"

    asyncio.run(main())
    job.delete()
