"""Objects of one tenant, declared or in the cluster, do no harm to the other jobs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.cluster.objects import DEVICE_KEYS
from taskd.clusterd.main import ServerConfig
from taskd.model.codes import RecoverCode
from taskd.wire._pb import control_pb2 as control
from tests.integration.clusterd.client import started
from tests.integration.clusterd.objects import JOB, Objects, cluster, joined

DEEP = {"array": "[" * 60_000, "object": '{"a":' * 40_000, "complete": "[" * 900 + "]" * 900}
"""JSON with more levels than Python can read, or than it can write again."""


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    made = Objects(tmp_path / "cluster")
    for node in range(2):
        made.pod(node)
    made.group()
    return made


def contents(objects: Objects) -> dict[str, str]:
    return {str(path): path.read_text() for path in objects.directory.rglob("*.yaml")}


@pytest.mark.parametrize("job", ["train", "evil"])
def test_declared_job_does_not_touch_objects_of_another(objects: Objects, job: str) -> None:
    """With the names of another job's PodGroup, pods and reset-config."""
    objects.reset_config(UpdateTime=77)
    before = contents(objects)

    async def main() -> None:
        async with cluster(objects) as (_, client):
            client.job = job
            node = control.Node(node_rank=0, name="elsewhere", ranks=[7])
            declaration = control.JobDeclaration(
                job=job, name="train", namespace="team", strategies=["retry"], nodes=[node]
            )
            answer = await client.control.DeclareJob(declaration)
            if job == "train":
                assert answer.code == RecoverCode.InvalidReqParam
                assert "another job" in answer.info
            else:
                assert [await client.code(name) for name in ("Init", "Register")] == [0, 0]

    asyncio.run(main())
    after = contents(objects)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("place", ["../../outside/x", "/{absolute}/x", "..", "a/b"])
def test_declared_job_writes_no_file_elsewhere(objects: Objects, place: str) -> None:
    outside = objects.directory.parent / "outside"
    outside.mkdir()
    namespace = place.format(absolute=str(outside).lstrip("/"))

    async def main() -> None:
        async with cluster(objects) as (_, client):
            for job, where in (("evil", namespace), (namespace, "default")):
                client.job = job
                declaration = control.JobDeclaration(job=job, namespace=where)
                assert (await client.control.DeclareJob(declaration)).code == 0
                assert await client.code("Init") == 0

    asyncio.run(main())
    assert not list(outside.iterdir())
    folders = {path.parent.parent for path in objects.directory.parent.rglob("*.yaml")}
    assert folders == {objects.directory}


@pytest.mark.parametrize("field", ["name", "namespace", "framework"])
def test_long_names_of_a_declaration_are_refused(field: str) -> None:
    async def main() -> None:
        async with started(job="evil") as (_, client):
            declaration = control.JobDeclaration(job="evil")
            setattr(declaration, field, "x" * 300)
            answer = await client.control.DeclareJob(declaration)
            assert answer.code == RecoverCode.InvalidReqParam

    asyncio.run(main())


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize("place", ["pod", "reset", "devices", "switch", "public", "rings"])
def test_deep_json_of_one_job_does_not_stop_clusterd(
    objects: Objects, place: str, text: str, tmp_path: Path
) -> None:
    """Neither while it runs nor at its next start: then it would stop for all jobs."""
    config = ServerConfig(cluster_dir=objects.directory, journal=tmp_path / "journal")

    def plant() -> None:
        match place:
            case "pod":
                objects.pod(0, **{DEVICE_KEYS[0]: text})
            case "reset":
                config_map(objects, "reset-config-train", {"reset.json": text})
            case "devices":
                config_map(objects, "mindx-dl-deviceinfo-host0", {"DeviceInfoCfg": text})
            case "switch":
                objects.device_report(0, [])
                whole = objects.directory / "configmaps/kube-system.mindx-dl-deviceinfo-host0.yaml"
                whole.write_text(f"{whole.read_text()}\n  SwitchInfoCfg: '{text}'\n")
            case "public":
                labels = {"mc-consumer-publicfault": "true"}
                config_map(objects, "faults", {"PublicFault": text}, labels=labels)
            case _:
                config_map(objects, "rings-config-x", {"hccl.json": text}, labels={"jobID": "x"})

    async def main() -> None:
        async with started(config, job=JOB) as (server, client):
            await joined(server, client)
            plant()
            objects.pod(1, uid="another")
            owner = server.jobs.served[JOB]  # type: ignore[index]
            news = owner.changes()
            async with asyncio.timeout(20):
                while all(pod.uid != "another" for pod in owner.state.job.pods):
                    await news.wait()
                    news.clear()
        async with started(config, job=JOB) as (server, client):
            assert await client.code("Init") == 0
            assert JOB in server.jobs.served

    asyncio.run(main())


def config_map(
    objects: Objects, name: str, data: dict[str, str], labels: dict[str, str] | None = None
) -> None:
    body: Json = {"data": data, "metadata": {"labels": labels or {}}}
    objects.write("ConfigMap", name, body)
