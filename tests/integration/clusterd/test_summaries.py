"""Job summaries in ConfigMaps and in the Job service; rank tables in the Config service."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from taskd.clusterd import job_summaries
from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.cluster.summary_objects import (
    MAX_BYTES,
    rank_tables,
    summary_maps,
    summary_of,
)
from taskd.wire._pb import config_pb2, job_pb2
from taskd.wire._pb.config_pb2_grpc import ConfigStub
from taskd.wire._pb.job_pb2_grpc import JobStub
from tests.integration.clusterd.client import WAIT_S, Client
from tests.integration.clusterd.objects import JOB, Objects, cluster


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    made = Objects(tmp_path / "cluster")
    made.group()
    for node in range(2):
        made.pod(node)
    return made


def stub(client: Client, kind: Any) -> Any:
    return kind(client.channel)


def summary(objects: Objects) -> Json:
    try:
        data: Json = objects.read("configmaps", "job-summary-train")["data"]
    except FileNotFoundError:
        return {}
    return data


def test_summary_follows_the_job_until_it_is_gone(
    objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_summaries, "DELETED_S", 0.5)

    async def main() -> None:
        async with cluster(objects):
            await objects.until("configmaps", lambda: bool(summary(objects)))
            data = summary(objects)
            assert data["job_id"] == data["sid"] == JOB
            assert (data["job_name"], data["framework"]) == ("train", "pytorch")
            assert (data["operator"], data["job_status"]) == ("add", "running")
            table = json.loads(data["hccl.json"])
            assert (table["status"], table["server_count"]) == ("complete", "2")
            server = table["server_list"][1]
            assert (server["server_name"], server["pod_name"]) == ("host1", "train-1")
            assert [device["rank_id"] for device in server["device"]] == ["2", "3"]
            labels = objects.read("configmaps", "job-summary-train")["metadata"]["labels"]
            assert labels["outside-job-info"] == "true"
            objects.change_group(lambda body: body["status"].update(phase="Pending"))
            await objects.until("configmaps", lambda: summary(objects)["job_status"] == "pending")
            (objects.directory / "podgroups/team.train.yaml").unlink()
            await objects.until(
                "configmaps", lambda: summary(objects).get("operator") in (None, "delete")
            )
            await objects.until("configmaps", lambda: not summary(objects))

    asyncio.run(main())


def test_next_leader_writes_only_summaries_that_have_changed(objects: Objects) -> None:
    """A change of the leader is not a change of the job."""

    async def lead(job: str) -> None:
        """Until the summary of this job is there. Those of ids that sort before it are, too."""
        owner = {"uid": job, "name": job, "controller": True}
        about = {"ownerReferences": [owner], "labels": {"framework": "pytorch"}}
        objects.write("PodGroup", job, {"metadata": about, "status": {"phase": "Running"}})
        async with cluster(objects):
            made = objects.directory / f"configmaps/team.job-summary-{job}.yaml"
            await objects.until("configmaps", made.exists)

    asyncio.run(lead("later"))
    body = objects.read("configmaps", "job-summary-train")
    body["data"]["time"] = "1790000000"
    objects.write("ConfigMap", "job-summary-train", {k: body[k] for k in ("metadata", "data")})
    asyncio.run(lead("latest"))
    assert summary(objects)["time"] == "1790000000"
    objects.pod(1, uid="another", name="train-1-again")
    asyncio.run(lead("the last"))
    assert summary(objects)["time"] != "1790000000"


def test_foreign_keys_of_a_summary_are_kept(objects: Objects) -> None:
    objects.write("ConfigMap", "job-summary-train", {"data": {"mine": "1", "job_id": "old"}})

    async def main() -> None:
        async with cluster(objects):
            await objects.until("configmaps", lambda: summary(objects).get("job_id") == JOB)
            assert summary(objects)["mine"] == "1"

    asyncio.run(main())


def test_long_rank_table_is_divided_between_servers() -> None:
    owner = [{"uid": "j", "name": "big", "controller": True}]
    group = {
        "kind": "PodGroup",
        "metadata": {"name": "g", "ownerReferences": owner, "labels": {"framework": "pytorch"}},
        "spec": {"minMember": 900},
        "status": {"phase": "Running"},
    }
    devices = [{"device_id": str(i), "device_ip": "10.0.0.1", "rank_id": "1"} for i in range(16)]
    key = "ascend.kubectl.kubernetes.io/ascend-910-configuration"
    pods = [
        {
            "metadata": {
                "name": f"p{node}",
                "annotations": {
                    "hccl/rankIndex": str(node),
                    key: json.dumps({"devices": devices}),
                },
            },
        }
        for node in range(900)
    ]
    made = summary_of(group, pods, 1)
    tables = rank_tables(made)
    assert len(tables) > 1
    assert all(len(table) < MAX_BYTES + 4096 for table in tables)
    servers = [s for table in tables for s in json.loads(table)["server_list"]]
    assert [server["pod_name"] for server in servers] == [f"p{node}" for node in range(900)]
    maps = summary_maps(made, owner, {})
    assert [key.name for key in maps][:2] == ["job-summary-big", "job-summary-big-1"]
    assert {body["data"]["total"] for body in maps.values()} == {str(len(tables))}
    # A job that is not complete has no rank table yet.
    assert rank_tables(summary_of(group, pods[:899], 1)) == ['{"status":"initializing"}']


async def next_of(stream: Any) -> Any:
    async with asyncio.timeout(WAIT_S):
        message = await stream.read()
    assert message is not aio.EOF, "the stream has ended"  # type: ignore[attr-defined]
    return message


def test_subscriber_gets_all_jobs_and_every_change(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects) as (_, client):
            await objects.until("configmaps", lambda: bool(summary(objects)))
            jobs = stub(client, JobStub)
            assert (await jobs.Register(job_pb2.ClientInfo(role="me"))).code == 400
            answer = await jobs.Register(job_pb2.ClientInfo(role="CCAgent"))
            assert (answer.code, bool(answer.clientId)) == (200, True)
            me = job_pb2.ClientInfo(role="CCAgent", clientId=answer.clientId)
            unknown = job_pb2.ClientInfo(role="CCAgent", clientId="x")
            with pytest.raises(aio.AioRpcError) as refused:
                await jobs.SubscribeJobSummarySignal(unknown).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            single, listed = (
                jobs.SubscribeJobSummarySignal(me),
                jobs.SubscribeJobSummarySignalList(me),
            )
            first = await next_of(single)
            assert (first.jobId, first.jobStatus, first.operator) == (JOB, "running", "add")
            assert (first.cmIndex, first.total) == ("0", "1")
            assert json.loads(first.HcclJson)["status"] == "complete"
            whole = await next_of(listed)
            assert (whole.JobTotalNum, len(whole.jobSummarySignals)) == (1, 1)
            (objects.directory / "podgroups/team.train.yaml").unlink()
            gone = await next_of(single)
            assert (gone.operator, bool(gone.deleteTime)) == ("delete", True)
            assert (await next_of(listed)).jobSummarySignals[0].operator == "delete"

    asyncio.run(main())


def test_rank_table_of_an_inference_job_is_sent_when_complete_and_when_changed(
    objects: Objects,
) -> None:
    def part(name: str, app: str, address: str) -> None:
        labels = {"jobID": "mindie-1", "app": app}
        body = {"metadata": {"labels": labels}, "status": {"podIP": address}}
        objects.write("Pod", name, body)

    def ring(name: str, status: str, *servers: str) -> None:
        table = {"status": status, "server_list": [{"server_id": one} for one in servers]}
        labels = {"jobID": "mindie-1"}
        data = {"hccl.json": json.dumps(table)}
        objects.write("ConfigMap", name, {"metadata": {"labels": labels}, "data": data})

    async def main() -> None:
        async with cluster(objects) as (_, client):
            config = stub(client, ConfigStub)
            me = config_pb2.ClientInfo(jobId="mindie-1", role="controller")
            assert (await config.Register(config_pb2.ClientInfo())).code == 409
            with pytest.raises(aio.AioRpcError):
                await config.SubscribeRankTable(me).read()
            assert (await config.Register(me)).code == 0
            stream = config.SubscribeRankTable(me)
            await stream.initial_metadata()
            part("coordinator", "mindie-ms-coordinator", "10.0.0.1")
            part("controller", "mindie-ms-controller", "10.0.0.2")
            ring("rings-config-server-0", "initializing")
            ring("rings-config-server-0", "completed", "s0")
            message = await next_of(stream)
            assert message.jobId == "mindie-1"
            groups = json.loads(message.rankTable)["server_group_list"]
            assert [group["group_id"] for group in groups] == ["0", "1", "2"]
            assert groups[2]["server_list"] == [{"server_id": "s0"}]
            ring("rings-config-server-0", "completed", "s0", "s1")
            groups = json.loads((await next_of(stream)).rankTable)["server_group_list"]
            assert groups[2]["server_count"] == "2"

    asyncio.run(main())
