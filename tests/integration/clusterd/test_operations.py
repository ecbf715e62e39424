"""Operations on a running job, its profiling switch, its declaration and its progress."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from taskd.clusterd.main import Server, ServerConfig
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.wire._pb import control_pb2, profiling_pb2
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.clusterd.client import (
    WAIT_S,
    Client,
    Signals,
    connected,
    eventually,
    started,
    switch,
)


async def running(client: Client, server: Server) -> Signals:
    await client.declare("retry", "recover-in-place", nodes=2, per_node=2)
    await client.join()
    signals = await client.subscribe()
    owner = server.jobs.served[client.job]  # type: ignore[index]
    await eventually(
        lambda: owner.state.job.subscribed and bool(owner.state.job.pods), server, client.job
    )
    return signals


def nics(**devices: list[str]) -> pb.SwitchNics:
    ops = {node: pb.DeviceList(dev=dev, op=[True] * len(dev)) for node, dev in devices.items()}
    return pb.SwitchNics(jobID="job", nicOps=ops)


# NIC switch


def test_links_are_switched_while_the_job_is_paused() -> None:
    async def main() -> None:
        async with started() as (server, client):
            signals = await running(client, server)
            workers = client.recover.SubscribeNotifySwitch(pb.ClientInfo(jobId="job"))
            await workers.initial_metadata()
            assert await client.code("SwitchNicTrack", nics(host1=["0", "1"])) == 0
            operator = client.recover.SubscribeSwitchNicSignal(pb.SwitchNicRequest(jobID="job"))
            pause = await signals.next()
            assert (pause.signalType, list(pause.actions)) == ("stopTrain", ["pause_train"])
            assert await client.stopped(pause.uuid) == 0
            order = await workers.read()
            assert (list(order.rankID), list(order.op), order.jobId) == (
                ["2", "3"],
                [True] * 2,
                "job",
            )
            result = pb.SwitchResult(jobId="job", result=True)
            assert await client.code("ReplySwitchNicResult", result) == 0
            order = await signals.next()
            assert order.changeStrategy == "continue"
            assert await client.result("continue", uuid=order.uuid) == 0
            assert (await operator.read()).msg == "switch nic finish"
            assert await operator.read() is aio.EOF  # type: ignore[attr-defined]
            assert await client.code("ReplySwitchNicResult", result) == 401

    asyncio.run(main())


def test_result_of_an_operation_is_kept_for_a_late_subscriber() -> None:
    async def main() -> None:
        recovery = RecoveryConfig(operation_timeout_s=0.3)
        async with started(ServerConfig(recovery=recovery)) as (server, client):
            signals = await running(client, server)
            request = pb.SwitchNicRequest(jobID="job")
            with pytest.raises(aio.AioRpcError) as refused:
                await client.recover.SubscribeSwitchNicSignal(request).read()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert await client.code("SwitchNicTrack", nics(host0=["1"])) == 0
            pause = await signals.next()
            await client.stopped(pause.uuid)
            # No answer: the ordinary fault handling starts, and the operator can read why.
            assert (await signals.next("stopTrain")).actions == ["stop_train"]
            reply = await client.recover.SubscribeSwitchNicSignal(request, timeout=WAIT_S).read()
            assert "timeout" in reply.msg

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (nics(elsewhere=["0"]), "elsewhere"),
        (nics(host0=["7"]), "7"),
        (nics(), "no device"),
        (pb.SwitchNics(jobID="job", nicOps={"host0": pb.DeviceList(dev=["0"])}), "directions"),
        (pb.SwitchNics(jobID="unknown"), "not registered"),
    ],
)
def test_413_names_what_is_wrong_with_a_nic_switch(request_: pb.SwitchNics, says: str) -> None:
    async def main() -> None:
        async with started() as (server, client):
            await running(client, server)
            answer = await client.call("SwitchNicTrack", request_)
            assert answer.code == 413
            assert says in answer.info

    asyncio.run(main())


# Stress test


def ops(*listed: int) -> pb.StressOpList:
    return pb.StressOpList(ops=listed)


def test_a_stress_test_runs_on_the_named_nodes() -> None:
    async def main() -> None:
        async with started() as (server, client):
            signals = await running(client, server)
            workers = client.recover.SubscribeNotifyExecStressTest(pb.ClientInfo(jobId="job"))
            await workers.initial_metadata()
            asked = pb.StressTestParam(jobID="job", stressParam={"host1": ops(0, 1)})
            assert await client.code("StressTest", asked) == 0
            assert await client.code("StressTest", asked) == 411
            operator = client.recover.SubscribeStressTestResponse(pb.StressTestRequest(jobID="job"))
            pause = await signals.next()
            assert pause.timeout == 900
            await client.stopped(pause.uuid)
            order = await workers.read()
            assert {rank: list(o.ops) for rank, o in order.stressParam.items()} == {
                "2": [0, 1],
                "3": [0, 1],
            }
            fine = pb.StressTestRankResult(rankResult={"0": pb.StressTestOpResult(code="0")})
            result = pb.StressTestResult(jobId="job", stressResult={"2": fine, "3": fine})
            assert await client.code("ReplyStressTestResult", result) == 0
            order = await signals.next("changeStrategy")
            assert order.changeStrategy == "continue"
            await client.result("continue", uuid=order.uuid)
            assert (await operator.read()).msg.startswith("stress test finish")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("param", "code"),
    [
        (pb.StressTestParam(jobID="job", allNodesOps=[0]), 0),
        (pb.StressTestParam(jobID="job", allNodesOps=[2]), 413),
        (pb.StressTestParam(jobID="job", allNodesOps=[0, 0]), 413),
        (pb.StressTestParam(jobID="job", stressParam={"host0": ops()}), 413),
        (pb.StressTestParam(jobID="job", stressParam={"elsewhere": ops(0)}), 413),
        (pb.StressTestParam(jobID="job"), 413),
    ],
)
def test_the_operations_of_a_stress_test_are_checked(param: pb.StressTestParam, code: int) -> None:
    async def main() -> None:
        async with started() as (server, client):
            await running(client, server)
            assert await client.code("StressTest", param) == code

    asyncio.run(main())


# Profiling switch


def test_profiling_switch_is_checked_kept_and_sent_to_new_subscribers(tmp_path: Path) -> None:
    config = ServerConfig(journal=tmp_path / "journal")
    name = "default/job"
    info = profiling_pb2.ProfilingClientInfo(jobId="job", role="taskd")

    def wanted(where: str = name, **values: str) -> profiling_pb2.DataTypeReq:
        return profiling_pb2.DataTypeReq(jobNsName=where, profilingSwitch=switch(**values))

    async def main() -> None:
        async with started(config) as (_, client):
            with pytest.raises(aio.AioRpcError) as unknown:
                await client.trace.SubscribeDataTraceSwitch(info).read()
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            await client.declare("retry")
            modify, get = "ModifyTrainingDataTraceSwitch", "GetTrainingDataTraceSwitch"
            asked = profiling_pb2.DataStatusReq(jobNsName=name)
            assert await client.code(get, asked) == 404
            for wrong in (wanted("job"), wanted("a/b/c"), wanted(""), wanted(FP="yes")):
                assert await client.code(modify, wrong) == 300
            assert await client.code(modify, wanted("default/nobody")) == 404
            assert await client.code(modify, wanted(Step="on", FP="off")) == 200
            assert (await client.call(get, asked)).profilingSwitch.Step == "on"
            first = client.trace.SubscribeDataTraceSwitch(info)
            update = await first.read()
            assert (update.code, update.message) == (200, "update profiling switch")
            assert (update.profilingSwitch.Step, update.profilingSwitch.FP) == ("on", "off")
            second = client.trace.SubscribeDataTraceSwitch(info)
            await second.read()
            with pytest.raises(aio.AioRpcError) as taken:
                await first.read()
            assert taken.value.code() is grpc.StatusCode.ABORTED
            assert await client.code(modify, wanted(Step="off")) == 200
            assert (await second.read()).profilingSwitch.Step == "off"
        async with started(config) as (_, client):
            assert (await client.call(get, asked)).profilingSwitch.Step == "off"

    asyncio.run(main())


def test_profiling_switch_does_not_outlive_its_job(tmp_path: Path) -> None:
    """Also if it never registered."""
    config = ServerConfig(journal=tmp_path / "journal")
    asked = profiling_pb2.DataStatusReq(jobNsName="default/job")
    wanted = profiling_pb2.DataTypeReq(jobNsName="default/job", profilingSwitch=switch(FP="on"))

    async def main() -> None:
        async with started(config) as (_, client):
            await client.declare("retry")
            assert await client.code("ModifyTrainingDataTraceSwitch", wanted) == 200
            assert await client.code("EndJob", control_pb2.JobEnd(job="job")) == 0
        async with started(config) as (_, client):
            await client.declare("retry")
            assert await client.code("GetTrainingDataTraceSwitch", asked) == 404

    asyncio.run(main())


# Declaration, progress, the end


def test_a_declaration_is_checked_and_may_change() -> None:
    async def main() -> None:
        async with started() as (server, client):
            assert await client.declare("retry", "restart") == 409
            twice = control_pb2.JobDeclaration(
                job="job", nodes=[control_pb2.Node(node_rank=0, ranks=[0])] * 2
            )
            assert await client.code("DeclareJob", twice) == 409
            assert await client.code("DeclareJob", control_pb2.JobDeclaration()) == 409
            await running(client, server)
            assert await client.declare("dump", nodes=3, per_node=2) == 0
            owner = server.jobs.served["job"]  # type: ignore[index]
            await eventually(lambda: len(owner.state.job.pods) == 3, server)
            assert (await client.status()).strategies == ["dump", "exit"]
            assert await client.declare("dump", nodes=1, per_node=2) == 0
            await eventually(lambda: len(owner.state.job.pods) == 1, server)
            moved = control_pb2.JobDeclaration(job="job", namespace="elsewhere")
            assert await client.code("DeclareJob", moved) == 0
            assert await client.fault(1) == 0
            assert (await client.status()).line.namespace == "elsewhere"

    asyncio.run(main())


def test_progress_is_shown_and_watched() -> None:
    async def main() -> None:
        async with started() as (server, client), connected(server.address) as watcher:
            progress = control_pb2.JobProgress(job="job", step=7, steps_per_s=2.5, world=4)
            assert await client.code("PublishProgress", progress) == 400
            await running(client, server)
            watch = watcher.control.Watch(control_pb2.JobRequest(job="job"))
            assert (await watch.read()).line.step == 0
            progress.ranks.append(control_pb2.RankStatus(rank=3, phase="training"))
            assert await client.code("PublishProgress", progress) == 0
            async with asyncio.timeout(WAIT_S):
                while (status := await watch.read()).line.step != 7:
                    pass
            assert (status.line.world, status.ranks[0].phase) == (4, "training")
            assert await client.fault(3) == 0
            async with asyncio.timeout(WAIT_S):
                while (status := await watch.read()).line.state != "Stopping":
                    pass
            assert [fault.rank for fault in status.faults] == [3]
            assert status.deadline_unix_ms > status.line.changed_unix_ms

    asyncio.run(main())


def test_ended_job_makes_room_and_keeps_its_history() -> None:
    async def main() -> None:
        async with started() as (server, client):
            signals = await running(client, server)
            await client.fault(1)
            await signals.next()
            watch = client.control.Watch(control_pb2.JobRequest(job="job"))
            await watch.read()
            end = control_pb2.JobEnd(job="job", because="it is done")
            assert await client.code("EndJob", end) == 0
            with pytest.raises(aio.AioRpcError) as over:
                await signals.next()
            assert over.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await client.fault(1) == 400
            assert await client.code("EndJob", end) == 0
            assert await server.journal.notes() == {}
            assert await server.journal.records() == {}
            with pytest.raises(aio.AioRpcError) as unknown:
                await client.status()
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
            assert any("rank 1" in line.because for line in await client.history())
            await running(client, server)
            assert (await client.status()).line.incident == 0

    asyncio.run(main())


def test_operator_can_report_faults() -> None:
    async def main() -> None:
        async with started() as (server, client):
            report = control_pb2.FaultReport(job="job")
            assert await client.code("ReportFault", report) == 400
            signals = await running(client, server)
            assert await client.code("ReportFault", report) == 409
            report.faults.append(control_pb2.JobFault(rank=-3))
            assert await client.code("ReportFault", report) == 409
            report.faults[0].rank, report.reporter = 2, "somebody"
            assert await client.code("ReportFault", report) == 0
            assert (await signals.next()).faultRanks[0].rankId == "2"
            assert "somebody" in (await client.status()).faults[0].evidence

    asyncio.run(main())


def test_health_service_is_optional() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async def main() -> None:
        async with started(ServerConfig(health=True)) as (_, client):
            stub = health_pb2_grpc.HealthStub(client.channel)
            for service in ("", "Recover", "TrainingDataTrace", "taskd.v1.Control"):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING

    asyncio.run(main())
