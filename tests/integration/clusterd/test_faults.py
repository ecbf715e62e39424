"""Reports of devices, nodes, switches and third parties; the services PubFault and Fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc import aio

from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.main import Server, ServerConfig
from taskd.core.clusterd.states import Idle
from taskd.wire._pb import fault_pb2, pubfault_pb2
from taskd.wire._pb.fault_pb2_grpc import FaultStub
from taskd.wire._pb.pubfault_pb2_grpc import PubFaultStub
from tests.integration.clusterd.client import WAIT_S, Client, eventually, started
from tests.integration.clusterd.objects import JOB, Objects, cluster, device_fault, joined

NOW_MS = 1_790_000_000_000


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    made = Objects(tmp_path / "cluster")
    for node in range(2):
        made.pod(node)
    made.reset_config()
    made.group()
    return made


def codes_of(server: Server) -> list[tuple[int, str, str]]:
    owner = server.jobs.get(JOB)
    assert owner is not None
    return [(fault.rank, fault.code, fault.level) for fault in owner.state.job.seen]


def test_unhealthy_node_and_switch_start_a_round(objects: Objects) -> None:
    async def main(report: Any, wanted: tuple[int, str, str]) -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            report()
            signal = await signals.next("preExitProcess")
            assert list(signal.nodeRankIds) == ["1"]
            assert wanted in codes_of(server)

    memory = {
        "DeviceType": "Memory",
        "DeviceId": [0],
        "FaultCode": ["0100001D"],
        "FaultLevel": "SeparateFault",
    }
    asyncio.run(
        main(
            lambda: objects.node_report(1, "UnHealthy", memory),
            (3, "0100001D", "SeparateNPU"),
        )
    )
    objects.node_report(1, "Healthy")
    chip = {"AssembledFaultCode": "[0x00f1,1,na,na]", "SwitchChipId": 2, "SwitchPortId": 7}
    switch = {
        "FaultCode": [json.dumps(chip)],
        "FaultLevel": "Separate",
        "NodeStatus": "UnHealthy",
        "FaultTimeAndLevelMap": {"[0x00f1,1,na,na]_2_7": {"fault_level": "Separate"}},
    }
    asyncio.run(
        main(
            lambda: objects.device_report(1, [], switch=switch),
            (2, "[0x00f1,1,na,na]", "SeparateNPU"),
        )
    )


def test_lost_link_and_failed_collective_label_and_separate_a_pod(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects) as (server, client):
            await joined(server, client)
            link = device_fault("81078603", "NotHandleFault")
            objects.device_report(1, [link])
            owner = server.jobs.get(JOB)
            assert owner is not None
            await eventually(lambda: bool(owner.state.job.seen), server, JOB)
            assert isinstance(owner.state, Idle)
            objects.device_report(0, [device_fault("8C1F8608", "NotHandleFault")])
            await objects.until("pods", lambda: label(objects, 1) == "Separate")
            assert label(objects, 0) == ""

    asyncio.run(main())


def label(objects: Objects, node: int) -> str:
    labels = objects.read("pods", f"train-{node}")["metadata"].get("labels", {})
    return str(labels.get("fault-type", ""))


def test_filtered_fault_counts_only_when_it_lasts(objects: Objects) -> None:
    objects.group(annotations={"huawei.com/schedule.filter.faultLevel": "SeparateNPU:1"})

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            began = asyncio.get_running_loop().time()
            objects.device_report(1, [device_fault("80E18005", "SeparateNPU")])
            await signals.next("preExitProcess")
            assert asyncio.get_running_loop().time() - began > 0.9

    asyncio.run(main())


# Public faults

CODES = {
    "publicFaultCode": {"SeparateNPUCodes": ["220001001"], "SubHealthFaultCodes": ["200001012"]},
    "publicFaultResource": ["CCAE"],
}


def public(assertion: str = "occur", **changes: Any) -> pubfault_pb2.PublicFaultRequest:
    fault = pubfault_pb2.Fault(
        faultId="fault-0001",
        faultType="Storage",
        faultCode="220001001",
        faultTime=NOW_MS,
        assertion=assertion,
        influence=[pubfault_pb2.PubFaultInfo(nodeName="host1", deviceIds=[1])],
    )
    values = {"id": "message-1", "timestamp": NOW_MS, "version": "1.0", "resource": "CCAE"}
    return pubfault_pb2.PublicFaultRequest(**{**values, "faults": [fault], **changes})


@asynccontextmanager
async def with_codes(objects: Objects, **config: Any) -> AsyncIterator[tuple[Server, Client]]:
    codes = objects.directory.parent / "codes.json"
    codes.write_text(json.dumps(CODES))
    settings = ServerConfig(cluster_dir=objects.directory, public_codes=codes, **config)
    async with started(settings, job=JOB) as pair:
        yield pair


def stub(client: Client, kind: Any) -> Any:
    return kind(client.channel)


def test_public_fault_starts_a_round_and_survives_a_restart(
    objects: Objects, tmp_path: Path
) -> None:
    journal = tmp_path / "journal"

    async def main() -> None:
        async with with_codes(objects, journal=journal) as (server, client):
            signals = await joined(server, client)
            answer = await stub(client, PubFaultStub).SendPublicFault(public(), timeout=WAIT_S)
            assert (answer.code, answer.info) == (0, "The call succeeded.")
            assert (await signals.next("preExitProcess")).nodeRankIds == ["1"]
        async with with_codes(objects, journal=journal) as (server, client):
            await client.join()
            owner = server.jobs.get(JOB)
            assert owner is not None
            await eventually(
                lambda: (3, "220001001", "SeparateNPU") in codes_of(server), server, JOB
            )
            answer = await stub(client, PubFaultStub).SendPublicFault(
                public("recover"), timeout=WAIT_S
            )
            assert answer.code == 0
            await eventually(lambda: not codes_of(server), server, JOB)

    asyncio.run(main())


def test_invalid_public_faults_are_refused_and_too_many_are_limited(objects: Objects) -> None:
    async def main() -> None:
        async with with_codes(objects) as (_, client):
            send = stub(client, PubFaultStub).SendPublicFault
            answer = await send(public(version="2"), timeout=WAIT_S)
            assert (answer.code, "version" in answer.info) == (409, True)
            unknown = public()
            unknown.faults[0].faultCode = "999999999"
            answer = await send(unknown, timeout=WAIT_S)
            assert (answer.code, "no list" in answer.info) == (409, True)
            both = public()
            both.faults.append(unknown.faults[0])
            answer = await send(both, timeout=WAIT_S)
            assert (answer.code, answer.info[:20]) == (0, "1 faults are ignored")
            found = {(await send(public(), timeout=WAIT_S)).code for _ in range(120)}
            assert found == {0, 410}

    asyncio.run(main())


def test_public_fault_may_come_in_a_config_map(objects: Objects) -> None:
    fault = {
        "faultId": "fault-0001",
        "faultType": "NPU",
        "faultCode": "220001001",
        "faultTime": NOW_MS,
        "assertion": "occur",
        "influence": [{"nodeName": "host1", "deviceIds": [0]}],
    }
    content = {
        "id": "message-1",
        "timestamp": NOW_MS,
        "version": "1.0",
        "resource": "CCAE",
        "faults": [fault],
    }

    async def main() -> None:
        async with with_codes(objects) as (server, client):
            signals = await joined(server, client)
            labels = {"mc-consumer-publicfault": "true"}
            for text in ("no json", json.dumps(content)):
                body = {"metadata": {"labels": labels}, "data": {"PublicFault": text}}
                objects.write("ConfigMap", "storage", body)
            await signals.next("preExitProcess")
            assert (2, "220001001", "SeparateNPU") in codes_of(server)

    asyncio.run(main())


# The Fault service


def info(job: str = JOB, role: str = "me") -> fault_pb2.ClientInfo:
    return fault_pb2.ClientInfo(jobId=job, role=role)


async def next_signal(stream: Any) -> fault_pb2.FaultMsgSignal:
    async with asyncio.timeout(WAIT_S):
        signal = await stream.read()
    assert isinstance(signal, fault_pb2.FaultMsgSignal), "the stream has ended"
    return signal


def test_subscriber_learns_of_faults_and_of_their_end(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects) as (_, client):
            faults = stub(client, FaultStub)
            with pytest.raises(aio.AioRpcError) as refused:
                await faults.SubscribeFaultMsgSignal(info()).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (await faults.Register(info("nobody"))).code == 402
            assert (await faults.Register(info(role=""))).code == 409
            streams = []
            for job in (JOB, ""):
                assert (await faults.Register(info(job))).code == 200
                streams.append(faults.SubscribeFaultMsgSignal(info(job)))
                await streams[-1].initial_metadata()
            objects.device_report(1, [device_fault("80E18005", "SeparateNPU")])
            for stream in streams:
                signal = await next_signal(stream)
                assert (signal.signalType, signal.jobId) == ("fault", JOB)
                (node,) = signal.nodeFaultInfo
                assert (node.nodeName, node.faultLevel) == ("host1", "UnHealthy")
                (device,) = node.faultDevice
                assert (device.deviceId, device.deviceType) == ("1", "NPU")
                assert (list(device.faultCodes), list(device.faultLevels)) == (
                    ["80E18005"],
                    ["SeparateNPU"],
                )
            answer = await faults.GetFaultMsgSignal(info(), timeout=WAIT_S)
            assert (answer.code, answer.faultSignal.signalType) == (200, "fault")
            assert (await faults.GetFaultMsgSignal(info("nobody"))).faultSignal.jobId == ""
            assert (await faults.GetFaultMsgSignal(info("x" * 200))).code == 409
            objects.device_report(1, [])
            for stream in streams:
                signal = await next_signal(stream)
                assert (signal.signalType, list(signal.nodeFaultInfo)) == ("normal", [])
            assert (await faults.Register(info())).code == 200
            with pytest.raises(aio.AioRpcError) as replaced:
                await next_signal(streams[0])
            assert replaced.value.code() is grpc.StatusCode.ABORTED

    asyncio.run(main())


def test_fault_that_the_job_repairs_by_itself_is_not_shown(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            faults = stub(client, FaultStub)
            objects.device_report(1, [device_fault("80E01801", "RestartBusiness")])
            await signals.next("stopTrain")
            assert codes_of(server) == [(3, "80E01801", "RestartBusiness")]
            answer = await faults.GetFaultMsgSignal(info(), timeout=WAIT_S)
            assert answer.faultSignal.signalType == "normal"
            whole = await faults.GetFaultMsgSignal(info(""), timeout=WAIT_S)
            assert whole.faultSignal.signalType == "normal"

    asyncio.run(main())


# For the scheduler


def cluster_info(objects: Objects, name: str = "cluster-info-device-0") -> Json:
    path = objects.directory / "configmaps" / f"mindx-dl.{name}.yaml"
    try:
        body: Json = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        return {}
    assert body["metadata"]["labels"]["mx-consumer-volcano"] == "true"
    content: Json = json.loads(body["data"][name])
    return content


def shown_codes(objects: Objects) -> list[str]:
    info = cluster_info(objects).get("mindx-dl-deviceinfo-host1", {})
    listed = info.get("DeviceList", {}).get("huawei.com/Ascend910-Fault", "[]")
    return [entry["fault_code"] for entry in json.loads(listed)]


def test_scheduler_gets_all_reports_without_what_jobs_repair_by_themselves(
    objects: Objects,
) -> None:
    objects.group("retry")

    async def main() -> None:
        async with with_codes(objects) as (server, client):
            await joined(server, client)
            memory = device_fault("80E01801", "RestartBusiness")
            objects.device_report(1, [memory, device_fault("80E18005", "NotHandleFault", 0)])
            await objects.until("configmaps", lambda: shown_codes(objects) == ["80E18005"])
            objects.node_report(1, "Healthy")
            await objects.until(
                "configmaps", lambda: bool(cluster_info(objects, "cluster-info-node-cm"))
            )
            nodes = cluster_info(objects, "cluster-info-node-cm")
            assert nodes["mindx-dl-nodeinfo-host1"]["NodeStatus"] == "Healthy"
            # The memory error is shown when the job has not reported it in time.
            await objects.until(
                "configmaps", lambda: shown_codes(objects) == ["80E01801", "80E18005"]
            )
            await stub(client, PubFaultStub).SendPublicFault(public(), timeout=WAIT_S)
            await objects.until("configmaps", lambda: "220001001" in shown_codes(objects))
            lists = cluster_info(objects)["mindx-dl-deviceinfo-host1"]["DeviceList"]
            assert lists["huawei.com/Ascend910-Unhealthy"] == "Ascend910-1"

    asyncio.run(main())


def test_damaged_reports_are_not_passed_on(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects):
            objects.device_report(0, [], check="wrong")
            objects.device_report(1, [device_fault("80E18005", "SeparateNPU")])
            await objects.until("configmaps", lambda: shown_codes(objects) == ["80E18005"])
            assert list(cluster_info(objects)) == ["mindx-dl-deviceinfo-host1"]

    asyncio.run(main())
