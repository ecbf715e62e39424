"""clusterd with a cluster in a directory: what it reads there, what it writes, and when."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskd.clusterd.cluster.interface import Json
from taskd.clusterd.main import ServerConfig
from taskd.core.clusterd.states import Killing
from taskd.model.ids import JobId
from taskd.wire._pb import control_pb2, profiling_pb2
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.clusterd.client import WAIT_S, Client, connected, eventually, started, switch
from tests.integration.clusterd.objects import (
    JOB,
    Objects,
    cluster,
    joined,
    lost_for_good,
    mark,
    quiet,
)


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    made = Objects(tmp_path / "cluster")
    for node in range(2):
        made.pod(node)
    return made


def test_502_403_402_and_501_before_a_job_is_served(objects: Objects) -> None:
    async def main() -> None:
        async with cluster(objects) as (_, client):
            assert await client.code("Init") == 502
            objects.group(labels={"process-recover-enable": "off"})
            await _until(client, "Init", 403)
            objects.group(labels={"process-recover-enable": "pause"})
            await _until(client, "Init", 0)
            (objects.directory / "podgroups" / "team.train.yaml").unlink()
            await _until(client, "Register", 402)
            assert await client.code("Register") == 408
            objects.group()
            await _until(client, "Init", 0)
            objects.reset_config(RankList=[{"Policy": "reset"}])
            await _until(client, "Register", 501)
            objects.reset_config()
            await _until(client, "Register", 0)

    asyncio.run(main())


def test_unknown_strategy_is_ignored_and_named_once(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    objects.group("retry, recovery")

    async def main() -> None:
        async with cluster(objects) as (_, client):
            await client.join()

    asyncio.run(main())
    (line,) = [text for text in caplog.messages if "recover-strategy" in text]
    assert "unknown value 'recovery'" in line


async def _until(client: Client, method: str, code: int) -> None:
    """The file was written before the call, but its change event may come after it."""
    async with asyncio.timeout(WAIT_S):
        while await client.code(method) != code:
            pass


def test_register_resets_the_label_pause(objects: Objects) -> None:
    objects.group(labels={"process-recover-enable": "pause"})

    async def main() -> None:
        async with cluster(objects) as (_, client):
            await client.join()
            assert mark(objects) == "on"

    asyncio.run(main())


def test_pod_replacement_writes_every_step_to_reset_config(objects: Objects) -> None:
    objects.group("recover,dump")
    objects.reset_config()

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            await client.fault(2)
            stop = await signals.next("stopTrain")
            await objects.until("configmaps", lambda: bool(objects.reset["FaultFlushing"]))
            await client.stopped(stop.uuid)
            announced = await signals.next("globalFault")
            assert list(announced.actions) == ["on_global_rank", "fault_nodes_exit"]
            assert list(announced.nodeRankIds) == ["1"]
            assert [fault.rankId for fault in announced.faultRanks] == ["2", "3"]
            await objects.until(
                "configmaps",
                lambda: [entry["RankId"] for entry in objects.reset["RankList"]] == [2, 3],
            )
            await client.offer("recover", "dump", "exit", uuid=stop.uuid)
            assert (await signals.next("changeStrategy")).changeStrategy == "recover"
            objects.pod(1, uid="pod-1b")
            assert await client.result("recover", uuid=stop.uuid) == 0
            await objects.until("configmaps", lambda: objects.reset["RankList"] == [])
            assert objects.reset["RetryTime"] == 3
            await objects.until(
                "podgroups",
                lambda: (
                    objects.read("podgroups", "train")["metadata"]["annotations"].get(
                        "ProcessRecoverStatus"
                    )
                    == "recover-success"
                ),
            )

    asyncio.run(main())


@pytest.mark.parametrize("deletes", [True, False])
def test_pods_are_deleted_only_where_clusterd_is_configured_to(
    objects: Objects, deletes: bool
) -> None:
    config = ServerConfig(cluster_dir=objects.directory, delete_pods=deletes)
    pod = objects.directory / "pods" / "team.train-1.yaml"

    async def main() -> None:
        async with started(config, job=JOB) as (server, client):
            signals = await joined(server, client)
            await client.fault(2)
            signal = await signals.next("stopTrain")
            await client.stopped(signal.uuid)
            signal = await signals.next("globalFault")
            assert pod.exists()
            await client.offer("recover", "exit", uuid=signal.uuid)
            signal = await signals.next("changeStrategy")
            assert signal.changeStrategy == "recover"
            await quiet(server)
            assert pod.exists() is not deletes
            objects.pod(1, "pod-1b")
            await client.result("recover", uuid=signal.uuid)
            assert pod.exists(), "the new pod of the same name stays"

    objects.group("recover")
    asyncio.run(main())


def test_label_pause_is_reset_after_the_scheduler_restarted_the_job(
    objects: Objects,
) -> None:
    objects.group("recover")

    async def main() -> None:
        async with cluster(objects, reschedule_timeout_s=0.3, exit_timeout_s=0.3) as (
            server,
            client,
        ):
            await lost_for_good(client, await joined(server, client))
            await objects.until("podgroups", lambda: mark(objects) == "pause")
            await quiet(server)
            objects.change_group(lambda body: body["status"].update(phase="Pending"))
            owner = server.jobs.served[JOB]  # type: ignore[index]
            await eventually(lambda: owner.state.job.phase == "Pending", server, JOB)
            objects.change_group(lambda body: body["status"].update(phase="Running"))
            await objects.until("podgroups", lambda: mark(objects) == "on")

    asyncio.run(main())


def test_503_when_the_scheduler_does_not_restart_the_job(objects: Objects) -> None:
    objects.group("recover")

    async def main() -> None:
        async with cluster(
            objects, reschedule_timeout_s=0.3, exit_timeout_s=0.3, running_timeout_s=0.3
        ) as (server, client):
            signals = await joined(server, client)
            await lost_for_good(client, signals)
            signals.cancel()
            owner = server.jobs.served[JOB]  # type: ignore[index]
            await eventually(lambda: isinstance(owner.state, Killing), server, JOB)
            assert await client.result("recover") == 503
            assert (await (await client.subscribe()).next()).signalType == "killMaster"
            await objects.until("podgroups", lambda: mark(objects) == "on")

    asyncio.run(main())


def annotation(objects: Objects, name: str) -> str | None:
    notes = objects.read("podgroups", "train")["metadata"]["annotations"]
    return notes.get(name)  # type: ignore[no-any-return]


def test_platform_mode_asks_confirms_and_waits_for_the_rank_table(objects: Objects) -> None:
    objects.group(annotations={"ProcessRecoverStrategy": ""})

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            await client.fault(3)
            await quiet(server)
            objects.change_group(
                lambda body: body["metadata"]["annotations"].update(
                    ProcessRecoverStrategy="recover"
                )
            )
            stop = await signals.next("stopTrain")
            await client.stopped(stop.uuid)
            await objects.until(
                "podgroups", lambda: annotation(objects, "ProcessConfirmFault") == "3:1"
            )
            await quiet(server)
            objects.change_group(
                lambda body: body["metadata"]["annotations"].update(ProcessResultFault="2:1")
            )
            announced = await signals.next("globalFault")
            assert {fault.rankId for fault in announced.faultRanks} == {"2", "3"}
            await client.offer("recover", "exit", uuid=stop.uuid)
            await quiet(server)
            objects.change_group(
                lambda body: body["metadata"]["annotations"].update(RankTableReady="true")
            )
            assert (await signals.next("changeStrategy")).changeStrategy == "recover"

    asyncio.run(main())


def test_hot_switch_moves_a_sub_healthy_pod(objects: Objects) -> None:
    objects.group(labels={"subHealthyStrategy": "hotSwitch"})

    def pod_notes(name: str = "train-1") -> Json:
        notes: Json = objects.read("pods", name)["metadata"]["annotations"]
        return notes

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            owner = server.jobs.served[JobId(JOB)]
            objects.sub_health(1)
            signal = await signals.next("hot-switch")
            assert list(signal.actions) == ["hot switch"]
            assert [fault.rankId for fault in signal.faultRanks] == ["2", "3"]
            await objects.until("pods", lambda: pod_notes().get("needOperatorOpe") == "create")
            assert pod_notes()["inHotSwitchFlow"] == "true"
            objects.pod(1, "pod-1b", "train-1b", podType="backup", inHotSwitchFlow="true")
            assert list((await signals.next("hot-switch")).actions) == ["new pod running"]
            await client.offer("migration")
            await objects.until("pods", lambda: pod_notes().get("needVolcanoOpe") == "delete")
            (objects.directory / "pods" / "team.train-1.yaml").unlink()
            assert (await signals.next("changeStrategy")).changeStrategy == "migration"
            objects.device_report(1, [])  # the backup, on the same host here, must not move again
            await eventually(lambda: not owner.state.job.seen, server, JOB)
            assert await client.result("migration") == 0
            await objects.until("pods", lambda: "inHotSwitchFlow" not in pod_notes("train-1b"))

    asyncio.run(main())


def test_a_hardware_fault_in_the_cluster_starts_a_round_by_itself(objects: Objects) -> None:
    objects.group("recover")

    async def main() -> None:
        async with cluster(objects, pre_exit_timeout_s=0.2) as (server, client):
            signals = await joined(server, client)
            objects.sub_health(1, level="SeparateNPU")
            leave = await signals.next()
            assert (leave.signalType, list(leave.actions)) == (
                "preExitProcess",
                ["pre exit process"],
            )
            assert list(leave.nodeRankIds) == ["1"]
            stop = await signals.next("stopTrain")
            assert [fault.rankId for fault in stop.faultRanks] == ["3"]

    asyncio.run(main())


def test_damaged_device_report_is_ignored_and_the_last_valid_one_counts(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    objects.group()
    (objects.directory / "configmaps").mkdir()

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            owner = server.jobs.served[JobId(JOB)]
            objects.sub_health(1, level="NotHandleFault")
            await eventually(lambda: bool(owner.state.job.seen), server, JOB)
            objects.sub_health(1, level="SeparateNPU", code="0" * 64)
            # Changes come in order: once this one is known, so is the one before.
            objects.sub_health(0, level="NotHandleFault")
            await eventually(lambda: len(owner.state.job.seen) == 2, server, JOB)
            assert {seen.level for seen in owner.state.job.seen} == {"NotHandleFault"}
            assert "mindx-dl-deviceinfo-host1 is ignored" in caplog.text
            objects.sub_health(1, level="SeparateNPU")
            assert (await signals.next()).signalType == "preExitProcess"

    asyncio.run(main())


def test_a_deleted_podgroup_ends_the_job(objects: Objects) -> None:
    objects.group()

    async def main() -> None:
        async with cluster(objects) as (server, client):
            await joined(server, client)
            (objects.directory / "podgroups" / "team.train.yaml").unlink()
            async with asyncio.timeout(WAIT_S):
                while await client.fault(1) != 400:
                    pass
            assert not server.jobs.served
            assert "deleted" in (await client.history())[-1].because

    asyncio.run(main())


TRACE = profiling_pb2.DataStatusReq(jobNsName="team/train")


def wanted(**values: str) -> profiling_pb2.DataTypeReq:
    return profiling_pb2.DataTypeReq(jobNsName="team/train", profilingSwitch=switch(**values))


def mount_trace(objects: Objects) -> None:
    """Both pods read the profiling switch from its ConfigMap."""
    for node in range(2):
        body = objects.read("pods", f"train-{node}")
        mount = {"mountPath": "/user/cluster-info/datatrace-config"}
        body["spec"]["containers"] = [{"volumeMounts": [mount]}]
        objects.write("Pod", f"train-{node}", {k: v for k, v in body.items() if k != "kind"})


def test_a_profiling_switch_reaches_subscriber_and_config_map(objects: Objects) -> None:
    objects.group()
    mount_trace(objects)

    async def main() -> None:
        async with cluster(objects) as (_, client):
            assert await client.code("ModifyTrainingDataTraceSwitch", wanted(Step="on")) == 200
            body = objects.read("configmaps", "data-trace-train")
            assert json.loads(body["data"]["profilingSwitch"])["Step"] == "on"
            assert body["metadata"]["labels"] == {"reset": "true"}
            info = profiling_pb2.ProfilingClientInfo(jobId=JOB)
            update = await client.trace.SubscribeDataTraceSwitch(info).read()
            assert (update.code, update.profilingSwitch.Step) == (200, "on")

    asyncio.run(main())


def test_switch_refused_by_the_cluster_is_not_kept(objects: Objects, tmp_path: Path) -> None:
    """500, and the switch is applied neither now nor after a restart."""
    objects.group()
    mount_trace(objects)
    config = ServerConfig(cluster_dir=objects.directory, journal=tmp_path / "journal")
    maps, away = objects.directory / "configmaps", objects.directory / "away"
    get, modify = "GetTrainingDataTraceSwitch", "ModifyTrainingDataTraceSwitch"

    async def main() -> None:
        async with started(config, job=JOB) as (_, client):
            assert await client.code(modify, wanted(Step="on")) == 200
            maps.rename(away)
            answer = await client.call(modify, wanted(Step="off"))
            assert answer.code == 500
            assert "data-trace-train" in answer.message
            assert (await client.call(get, TRACE)).profilingSwitch.Step == "on"
        away.rename(maps)
        async with started(config, job=JOB) as (_, client):
            assert (await client.call(get, TRACE)).profilingSwitch.Step == "on"
            body = objects.read("configmaps", "data-trace-train")
            assert json.loads(body["data"]["profilingSwitch"])["Step"] == "on"

    asyncio.run(main())


def test_switch_written_but_not_journaled_is_reported(objects: Objects) -> None:
    objects.group()
    mount_trace(objects)

    async def main() -> None:
        async with cluster(objects) as (server, client):
            await server.journal.aclose()
            answer = await client.call("ModifyTrainingDataTraceSwitch", wanted(Step="on"))
            assert answer.code == 500
            assert "data-trace-train has the new switch" in answer.message
            assert "the journal is closed" in answer.message

    asyncio.run(main())


def test_operations_are_checked_against_the_pods(objects: Objects) -> None:
    objects.group()

    async def main() -> None:
        async with cluster(objects) as (server, client):
            await joined(server, client)
            devices = pb.DeviceList(dev=["9"], op=[True])
            request = pb.SwitchNics(jobID=JOB, nicOps={"host1": devices})
            assert await client.code("SwitchNicTrack", request) == 413
            request.nicOps["host1"].dev[0] = "1"
            assert await client.code("SwitchNicTrack", request) == 0
            assert await client.code("SwitchNicTrack", request) == 411

    asyncio.run(main())


@contextmanager
def no_end(path: Path) -> Iterator[None]:
    """Writing this object hangs: its new file is a pipe without a reader."""
    pipe = path.with_name(f".{path.name}.{os.getpid()}")
    os.mkfifo(pipe)
    try:
        yield
    finally:
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        pipe.unlink()
        os.close(reader)


def calm(objects: Objects) -> None:
    """A second job in the same cluster."""
    owner = [{"uid": "calm", "name": "calm", "controller": True}]
    about = {
        "ownerReferences": owner,
        "labels": {"process-recover-enable": "on"},
        "annotations": {"recover-strategy": "recover"},
    }
    objects.write("PodGroup", "calm", {"metadata": about, "status": {"phase": "Running"}})
    body = objects.read("pods", "train-0")
    about = {**body["metadata"], "uid": "calm-0", "name": "calm-0", "ownerReferences": owner}
    objects.write("Pod", "calm-0", {"metadata": about, "spec": {"nodeName": "host5"}})


def test_hanging_write_does_not_delay_other_jobs(objects: Objects) -> None:
    """Not even its own job: decisions continue."""
    objects.group()
    calm(objects)

    async def main() -> None:
        async with (
            cluster(objects) as (server, client),
            connected(server.address, job="calm") as other,
        ):
            signals = await joined(server, client)
            with no_end(objects.directory / "podgroups" / "team.train.yaml"):
                await client.code("Register")
                owner = server.jobs.served[JobId(JOB)]
                (label,) = owner.record.undone
                await other.join()
                heard = await other.subscribe()
                second = server.jobs.served[JobId("calm")]
                await eventually(lambda: second.state.job.subscribed, server, "calm")
                assert await other.fault(1) == 0
                signal = await heard.next()
                assert (signal.signalType, signal.jobId) == ("stopTrain", "calm")
                assert await client.fault(2) == 0
                assert (await signals.next()).signalType == "stopTrain"
                assert label in owner.record.undone
            await quiet(server)

    asyncio.run(main())


@pytest.mark.parametrize("strategy", ["hotSwitch", "graceExit", "ignore"])
def test_straggler_counts_as_sub_healthy(objects: Objects, strategy: str) -> None:
    objects.group("dump", labels={"subHealthyStrategy": strategy})
    slow = control_pb2.Straggler(rank=2, cause="compute", evidence="rank 2 comes last")

    async def main() -> None:
        async with cluster(objects) as (server, client):
            signals = await joined(server, client)
            report = control_pb2.SubHealth(job=JOB, stragglers=[slow])
            assert await client.code("ReportSubHealth", report) == 0
            if strategy == "hotSwitch":
                signal = await signals.next("hot-switch")
                assert [fault.rankId for fault in signal.faultRanks] == ["2", "3"], "the whole pod"
                return
            if strategy == "ignore":
                assert await client.fault(0) == 0  # nothing else starts a round
            await signals.next("saveAndExit")
            began = [line.because for line in await client.history() if line.after == "Dumping"]
            why = "fault of rank 0" if strategy == "ignore" else "a device is sub-healthy"
            assert began[0].startswith(why), began

    asyncio.run(main())
