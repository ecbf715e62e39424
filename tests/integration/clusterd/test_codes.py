"""Every documented code of the Recover service, over the wire: how to get it, in one table.

The tests of the single parts ask what else happens; this one shows that no code is a dead letter.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc import aio

from taskd.clusterd.main import ServerConfig
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.clusterd.states import Replacing
from taskd.model.codes import RecoverCode
from taskd.runtime.limits.rate_limit import Rate
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.clusterd.client import Client, Signals, eventually, started
from tests.integration.clusterd.objects import JOB, Objects, cluster, joined, lost_for_good

EVERY = ("retry", "recover-in-place", "recover", "elastic-training", "dump")
OFFERS = ("retry", "recover", "downgrade", "dump", "exit")


@dataclass(frozen=True)
class Way:
    """`get` provokes the code and returns it; `objects` is an empty cluster for it."""

    code: RecoverCode
    get: Callable[[Objects], Awaitable[int]]


async def unregistered(_: Objects) -> int:
    async with started() as (_server, client):
        return await client.fault(1)


async def out_of_order(_: Objects) -> int:
    async with started() as (_server, client):
        await client.join()
        return await client.offer("recover")


async def no_such_job(objects: Objects) -> int:
    objects.group()
    async with cluster(objects) as (server, client):
        assert await client.code("Init") == 0
        (objects.directory / "podgroups" / "team.train.yaml").unlink()
        while server.jobs.facts(JOB) is not None:  # type: ignore[arg-type]
            await client.code("HealthCheck")
        return await client.code("Register")


async def recovery_off(objects: Objects) -> int:
    objects.group(labels={"process-recover-enable": "off"})
    async with cluster(objects) as (_, client):
        return await client.code("Init")


async def not_initialised(_: Objects) -> int:
    async with started() as (_server, client):
        return await client.code("Register")


async def odd_ranks(_: Objects) -> int:
    async with started() as (_server, client):
        await client.join()
        ranks = [pb.FaultRank(rankId="first", faultType="1")]
        request = pb.ProcessFaultRequest(jobId="job", faultRanks=ranks)
        return await client.code("ReportProcessFault", request)


async def busy_with_an_operation(_: Objects) -> int:
    async with started() as (_server, client):
        await client.declare(*EVERY)
        await client.join()
        await client.subscribe()
        asked = pb.StressTestParam(jobID="job", allNodesOps=[0])
        assert await client.code("StressTest", asked) == 0
        return await client.code("StressTest", asked)


async def unknown_operation(_: Objects) -> int:
    async with started() as (_server, client):
        await client.join()
        return await client.code("StressTest", pb.StressTestParam(jobID="job", allNodesOps=[7]))


async def too_many_jobs(_: Objects) -> int:
    async with started(ServerConfig(max_jobs=1)) as (_server, client):
        await client.join()
        return await Client(client.channel, job="another").code("Init")


async def reset_config_is_read_only(objects: Objects) -> int:
    objects.group()
    objects.reset_config(RankList=[{"Policy": "reset"}])
    _forbid(objects, "configmaps", "team.reset-config-train.yaml")
    async with cluster(objects) as (_, client):
        assert await client.code("Init") == 0
        return await client.code("Register")


async def pod_group_is_read_only(objects: Objects) -> int:
    objects.group(labels={"process-recover-enable": "pause"})
    _forbid(objects, "podgroups", "team.train.yaml")
    async with cluster(objects) as (_, client):
        assert await client.code("Init") == 0
        return await client.code("Register")


def _forbid(objects: Objects, folder: str, name: str) -> None:
    """This object cannot be written: a directory is in the way of its new file."""
    (objects.directory / folder / f".{name}.{os.getpid()}").mkdir()


async def pods_did_not_come(objects: Objects) -> int:
    """The result of a replacement that comes after its deadline."""
    objects.group("recover")
    async with cluster(objects, reschedule_timeout_s=0.3) as (server, client):
        signals = await joined(server, client)
        order = await ordered(client, signals, "recover", "exit")
        assert order.changeStrategy == "recover"
        owner = server.jobs.served[JOB]  # type: ignore[index]
        await eventually(lambda: not isinstance(owner.state, Replacing), server, JOB)
        assert await client.result("recover") == 503  # in the words of Ascend's clients
        return await client.result("recover", uuid=order.uuid)


async def scheduler_did_not_restart(objects: Objects) -> int:
    objects.group("recover")
    waits = {"reschedule_timeout_s": 0.3, "exit_timeout_s": 0.3, "running_timeout_s": 0.3}
    async with cluster(objects, **waits) as (server, client):
        signals = await joined(server, client)
        await lost_for_good(client, signals)
        signals.cancel()
        owner = server.jobs.served[JOB]  # type: ignore[index]
        await eventually(lambda: type(owner.state).__name__ == "Killing", server, JOB)
        return await client.result("dump")


async def signals_not_taken(_: Objects) -> int:
    small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    config = ServerConfig(signals=1, job_rate=Rate(1e6, 1e6))
    async with (
        started(config) as (server, client),
        aio.insecure_channel(server.address, options=small) as channel,
    ):
        await client.join()
        unread = await Client(channel).subscribe()
        many = [pb.FaultRank(rankId=str(rank)) for rank in range(10_000)]
        for number in range(400):
            extra = pb.FaultRank(rankId=str(100_000 + number))
            request = pb.ProcessFaultRequest(jobId="job", faultRanks=[*many, extra])
            if code := await client.code("ReportProcessFault", request):
                unread.cancel()
                return code
            await client.stopped()  # so that the next fault starts a round, with a signal
        return 0


async def reports_pile_up(_: Objects) -> int:
    async with started(ServerConfig(inbox=1)) as (_server, client):
        await client.join()
        return max(await asyncio.gather(*(client.fault(rank) for rank in range(50))))


async def round_is_over(_: Objects) -> int:
    async with started() as (_server, client):
        await client.join()
        signals = await client.subscribe()
        await client.fault(1)
        first = await signals.next()
        await client.stopped(first.uuid)
        await client.fault(2)
        return await client.offer("recover", uuid=first.uuid)


async def client_is_late(_: Objects) -> int:
    config = ServerConfig(recovery=RecoveryConfig(stop_timeout_s=0.2))
    async with started(config) as (_server, client):
        await client.join()
        signals = await client.subscribe()
        await client.fault(1)
        await signals.next("changeStrategy")
        return await client.stopped()


async def platform_names_nothing(objects: Objects) -> int:
    objects.group(annotations={"ProcessRecoverStrategy": ""})
    async with cluster(objects, platform_timeout_s=0.3) as (server, client):
        signals = await joined(server, client)
        await client.fault(3)
        await signals.next("changeStrategy")
        return await client.stopped()


async def platform_confirms_nothing(objects: Objects) -> int:
    objects.group(annotations={"ProcessRecoverStrategy": "recover"})
    async with cluster(objects, platform_timeout_s=0.3) as (server, client):
        signals = await joined(server, client)
        await client.fault(3)
        await client.stopped((await signals.next("stopTrain")).uuid)
        await signals.next("changeStrategy")
        return await client.offer("recover")


async def journal_is_gone(_: Objects) -> int:
    async with started() as (server, client):
        await client.join()
        await server.journal.aclose()
        return await client.fault(1)


WAYS = [
    Way(RecoverCode.UnRegistry, unregistered),
    Way(RecoverCode.OrderMix, out_of_order),
    Way(RecoverCode.JobNotExist, no_such_job),
    Way(RecoverCode.ProcessRecoverEnableOff, recovery_off),
    Way(RecoverCode.UnInit, not_initialised),
    Way(RecoverCode.InvalidReqParam, odd_ranks),
    Way(RecoverCode.OMIsRunning, busy_with_an_operation),
    Way(RecoverCode.OMParamInvalid, unknown_operation),
    Way(RecoverCode.OutOfMaxServeJobs, too_many_jobs),
    Way(RecoverCode.OperateConfigMapError, reset_config_is_read_only),
    Way(RecoverCode.OperatePodGroupError, pod_group_is_read_only),
    Way(RecoverCode.ScheduleTimeout, pods_did_not_come),
    Way(RecoverCode.ScheduleTimeout, scheduler_did_not_restart),
    Way(RecoverCode.SignalQueueBusy, signals_not_taken),
    Way(RecoverCode.EventQueueBusy, reports_pile_up),
    Way(RecoverCode.ControllerEventCancel, round_is_over),
    Way(RecoverCode.WaitReportTimeout, client_is_late),
    Way(RecoverCode.WaitPlatStrategyTimeout, platform_names_nothing),
    Way(RecoverCode.WriteConfirmFaultOrWaitPlatResultFault, platform_confirms_nothing),
    Way(RecoverCode.ServerInnerError, journal_is_gone),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.code:d}-{way.get.__name__}")
def test_every_code_can_be_produced(way: Way, tmp_path: Path) -> None:
    objects = Objects(tmp_path / "cluster")
    for node in range(2):
        objects.pod(node)

    async def main() -> None:
        assert await way.get(objects) == way.code

    asyncio.run(main())


# Codes that clients report


@dataclass(frozen=True)
class ReportedCode:
    """A client reports `code` for the order `order`; the next order, if any."""

    code: RecoverCode
    kind: str
    order: str
    after: tuple[str, str] = ("", "")
    state: str = ""
    """The state of the round after that, if there is no further order."""


REPORTED_CODES = [
    ReportedCode(RecoverCode.OK, "1", "recover", state="Idle"),
    ReportedCode(RecoverCode.RecoverableRetryError, "2", "retry", ("globalFault", "")),
    ReportedCode(
        RecoverCode.UnRecoverableRetryError, "2", "retry", ("changeStrategy", "downgrade")
    ),
    ReportedCode(RecoverCode.ClientError, "2", "retry", ("changeStrategy", "downgrade")),
    ReportedCode(RecoverCode.ClientError, "1", "recover", ("changeStrategy", "recover")),
    ReportedCode(RecoverCode.DumpError, "1", "dump", ("changeStrategy", "exit")),
    # In a cluster their nodes are replaced, too; without one they wait for the job to grow.
    ReportedCode(RecoverCode.ExitIsolateRanks, "1", "downgrade", state="Shrinking"),
]


async def ordered(
    client: Client, signals: Signals, *offers: str, kind: str = "1"
) -> pb.ProcessManageSignal:
    """From a fault to the first order."""
    await client.fault(3, kind=kind)
    await client.stopped((await signals.next()).uuid)
    await client.offer(*offers, uuid=(await signals.next()).uuid)
    return await signals.next()


@pytest.mark.parametrize(
    "report", REPORTED_CODES, ids=lambda report: f"{report.code:d}-{report.order}"
)
def test_every_reported_code_has_its_effect(report: ReportedCode) -> None:
    offers = OFFERS if report.order == "retry" else (report.order, "exit")

    async def main() -> None:
        async with started() as (_, client):
            await client.declare(*EVERY, nodes=2, per_node=2)
            await client.join()
            signals = await client.subscribe()
            order = await ordered(client, signals, *offers, kind=report.kind)
            assert order.changeStrategy == report.order
            assert await client.result(report.order, report.code, order.uuid) == 0
            if report.state:
                assert (await client.status()).line.state == report.state
            else:
                after = await signals.next()
                assert (after.signalType, after.changeStrategy) == report.after

    asyncio.run(main())


def test_404_of_a_client_whose_processes_do_not_run_ends_the_round() -> None:
    async def main() -> None:
        async with started() as (_, client):
            await client.join()
            signals = await client.subscribe()
            await client.fault(1)
            stop = await signals.next()
            assert await client.stopped(stop.uuid, RecoverCode.ProcessNotReady) == 0
            assert (await signals.next()).changeStrategy == "exit"

    asyncio.run(main())


def test_429_is_a_status_of_grpc() -> None:
    async def main() -> None:
        async with started(ServerConfig(job_rate=Rate(0.001, 1))) as (_, client):
            await client.join()
            await client.fault(1)
            with pytest.raises(aio.AioRpcError) as refused:
                await client.fault(2)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused.value.details() == RecoverCode.RateLimited.sentence

    asyncio.run(main())


def test_every_code_is_covered() -> None:
    shown = {way.code for way in WAYS} | {report.code for report in REPORTED_CODES}
    shown |= {RecoverCode.ProcessNotReady, RecoverCode.RateLimited}
    elsewhere = {
        RecoverCode.SuccessCode,  # of the fault and job services
        RecoverCode.InvalidReqRate,  # of the service for public faults
        RecoverCode.HCCLRoutingConvergenceFail,  # nothing reports it: retries wait and try
    }
    assert shown | elsewhere == set(RecoverCode)
