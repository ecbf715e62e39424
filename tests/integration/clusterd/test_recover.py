"""The Recover service over real connections: rounds, codes, streams, limits."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import AsyncExitStack

import grpc
import pytest
from grpc import aio

from taskd.clusterd.main import Server, ServerConfig
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.model.ids import JobId
from taskd.model.types import Tick
from taskd.runtime.limits.rate_limit import Rate
from taskd.wire._pb import control_pb2
from taskd.wire._pb import recover_pb2 as pb
from tests.integration.clusterd.client import (
    WAIT_S,
    Client,
    Signals,
    connected,
    eventually,
    started,
)


def state_of(server: Server, job: str = "job") -> str:
    owner = server.jobs.get(job)
    return "" if owner is None else type(owner.state).__name__


async def listening(server: Server, client: Client) -> Signals:
    """Subscribe, and wait until the owner knows."""
    signals = await client.subscribe()
    owner = server.jobs.get(client.job)
    assert owner is not None
    await eventually(lambda: owner.state.job.subscribed, server, client.job)
    return signals


def test_a_round_in_place_from_fault_to_training() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.declare("recover-in-place", nodes=2, per_node=2)
            await client.join()
            signals = await listening(server, client)
            assert await client.fault(3) == 0
            stop = await signals.next()
            assert (stop.signalType, list(stop.actions)) == ("stopTrain", ["stop_train"])
            assert [(f.rankId, f.faultType) for f in stop.faultRanks] == [("3", "1")]
            assert (stop.jobId, stop.incident) == ("job", 1)
            assert await client.stopped(stop.uuid) == 0
            announced = await signals.next()
            assert announced.signalType == "globalFault"
            assert announced.uuid == stop.uuid
            assert await client.offer("recover", "dump", "exit", uuid=stop.uuid) == 0
            order = await signals.next()
            assert (order.changeStrategy, order.extraParams) == ("recover", "recover-in-place")
            assert list(order.nodeRankIds) == ["1"]
            assert await client.result("recover", uuid=stop.uuid) == 0
            assert stop.sequence < announced.sequence < order.sequence
            assert state_of(server) == "Idle"
            # The stream survives the round, and the next round has another uuid.
            assert await client.fault(0) == 0
            assert (await signals.next()).uuid != stop.uuid
            status = await client.status()
            assert status.rounds[0].strategy == "recover-in-place"
            assert [fault.rank for fault in status.rounds[0].faults] == [3]

    asyncio.run(main())


def test_ordered_checkpoint_is_written_although_a_repair_is_possible() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.declare("recover-in-place", "recover", "dump", nodes=2, per_node=2)
            await client.join()
            signals = await listening(server, client)
            order = control_pb2.FaultReport(
                job="job", faults=[control_pb2.JobFault(rank=0, fault_type="1")], checkpoint=True
            )
            assert await client.code("ReportFault", order) == 0
            ordered = await signals.next()
            assert (ordered.signalType, list(ordered.actions)) == ("saveAndExit", ["save_and_exit"])

    asyncio.run(main())


def test_upstream_clients_need_neither_uuid_nor_declaration() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            signals = await listening(server, client)
            await client.fault(1, kind="2")
            await signals.next("stopTrain")
            assert await client.stopped() == 0
            announced = await signals.next("globalFault")
            assert announced.timeout == 33
            assert await client.offer("retry", "exit") == 0
            assert (await signals.next("changeStrategy")).changeStrategy == "retry"
            assert await client.result("retry") == 0
            assert state_of(server) == "Idle"

    asyncio.run(main())


# Codes


def test_400_408_and_0_follow_the_order_init_register_report() -> None:
    async def main() -> None:
        async with started() as (_, client):
            for method in ("fault", "stopped", "offer"):
                assert await getattr(client, method)() == 400
            assert await client.result("retry") == 400
            assert await client.code("ReplySwitchNicResult", pb.SwitchResult(jobId="job")) == 400
            stress = pb.StressTestResult(jobId="job")
            assert await client.code("ReplyStressTestResult", stress) == 400
            assert await client.code("Register") == 408
            assert await client.code("HealthCheck") == 0
            assert await client.code("Init") == 0
            assert await client.code("Init") == 0
            assert await client.fault(1) == 400
            assert await client.code("Register") == 0
            again = await client.call("Register")
            assert (again.code, again.info) == (0, "register success")
            assert await client.fault(1) == 0

    asyncio.run(main())


def test_401_for_unexpected_reports_and_506_for_ended_rounds() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.declare("retry", "recover-in-place")
            await client.join()
            assert await client.stopped() == 401
            assert await client.result("retry") == 401
            assert await client.offer("retry") == 401
            signals = await listening(server, client)
            await client.fault(1, kind="2")
            first = await signals.next()
            assert await client.result("retry", uuid=first.uuid) == 401
            assert await client.stopped("a uuid from nowhere") == 401
            await client.fault(3, kind="2")
            assert await client.stopped(first.uuid) == 0, "a fault before this belongs to the round"
            announced = await signals.next()
            assert [fault.rankId for fault in announced.faultRanks] == ["1", "3"]
            await client.fault(2)
            second = await signals.next()
            assert second.uuid != first.uuid
            assert await client.offer("retry", uuid=first.uuid) == 506
            assert await client.stopped(second.uuid) == 0
            assert await client.stopped(second.uuid) == 0, "a duplicate is no mistake"

    asyncio.run(main())


def test_409_if_all_ranks_are_invalid_otherwise_the_valid_ones_count() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            signals = await listening(server, client)
            bad = [pb.FaultRank(rankId=text) for text in ("", "-1", "x", "9" * 30, "1e3", "٣")]
            request = pb.ProcessFaultRequest(jobId="job", faultRanks=bad)
            assert await client.code("ReportProcessFault", request) == 409
            request.faultRanks.append(pb.FaultRank(rankId="2", faultType="strange"))
            assert await client.code("ReportProcessFault", request) == 0
            stop = await signals.next()
            assert [(f.rankId, f.faultType) for f in stop.faultRanks] == [("2", "1")]

    asyncio.run(main())


def test_409_for_too_long_lists() -> None:
    async def main() -> None:
        async with started() as (_, client):
            await client.join()
            assert await client.fault(*range(20_000)) == 409
            isolate = [str(rank) for rank in range(20_000)]
            request = pb.RecoverStatusRequest(jobId="job", isolateRankIds=isolate)
            assert await client.code("ReportRecoverStatus", request) == 409

    asyncio.run(main())


def test_500_at_the_maximum_number_of_jobs() -> None:
    async def main() -> None:
        async with started(ServerConfig(max_jobs=2)) as (server, client):
            codes = []
            for number in range(3):
                async with connected(server.address, job=f"job{number}") as other:
                    codes.append((await other.code("Init"), await other.code("Register")))
            assert codes == [(0, 0), (0, 0), (500, 408)]
            assert await client.code("EndJob", control_pb2.JobEnd(job="job1")) == 0
            await client.join()

    asyncio.run(main())


def test_504_while_the_subscriber_does_not_read_its_signals() -> None:
    async def main() -> None:
        small = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
        async with (
            started(ServerConfig(signals=3, job_rate=Rate(1e6, 1e6))) as (server, client),
            aio.insecure_channel(server.address, options=small) as channel,
        ):
            await client.join()
            signals = await Client(channel).subscribe()
            ranks = [pb.FaultRank(rankId=str(rank)) for rank in range(10_000)]
            codes = []
            for number in range(60):
                extra = pb.FaultRank(rankId=str(100_000 + number))
                request = pb.ProcessFaultRequest(jobId="job", faultRanks=[*ranks, extra])
                codes.append(await client.code("ReportProcessFault", request))
                if codes[-1]:
                    break
                await client.stopped()  # so that the next fault starts a round, with a signal
            assert codes[-1] == 504
            # Once the signals are read, reports are accepted again.
            newest = await signals.next()
            while newest.incident < len(codes) - 1:
                newest = await signals.next()
            assert await client.fault(99) == 0

    asyncio.run(main())


def test_505_when_reports_of_one_job_come_faster_than_they_are_handled() -> None:
    async def main() -> None:
        async with started(ServerConfig(inbox=2)) as (server, client):
            await client.join()
            slow_disk = threading.Event()
            held = asyncio.ensure_future(server.journal._ask(lambda _: slow_disk.wait()))
            reports = [asyncio.ensure_future(client.fault(rank)) for rank in range(10)]
            busy = 0
            while busy < 8:
                await asyncio.wait(reports, return_when=asyncio.FIRST_COMPLETED)
                done = [report for report in reports if report.done()]
                busy += len(done)
                assert {report.result() for report in done} == {505}
                reports = [report for report in reports if report not in done]
            slow_disk.set()
            assert await asyncio.gather(*reports) == [0, 0]
            await held

    asyncio.run(main())


def test_506_for_callers_that_wait_while_the_job_ends() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            owner = server.jobs.get("job")
            assert owner is not None
            waiting = [asyncio.ensure_future(client.fault(rank)) for rank in range(20)]
            end = client.code("EndJob", control_pb2.JobEnd(job="job"))
            codes = await asyncio.gather(end, *waiting)
            assert codes[0] == 0
            assert set(codes[1:]) <= {0, 400, 506}
            assert (await owner.ask(Tick())).code == 506

    asyncio.run(main())


def test_507_for_the_report_that_comes_after_its_deadline() -> None:
    async def main() -> None:
        recovery = RecoveryConfig(stop_timeout_s=0.2)
        async with started(ServerConfig(recovery=recovery)) as (server, client):
            await client.join()
            signals = await listening(server, client)
            await client.fault(1)
            stop = await signals.next("stopTrain")
            order = await signals.next("changeStrategy")
            assert order.changeStrategy == "exit"
            assert await client.stopped() == 507
            assert await client.stopped(stop.uuid) in (506, 507)

    asyncio.run(main())


# Streams


def test_unanswered_signal_is_sent_again_to_a_new_subscriber() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            assert await client.fault(1) == 0
            signals = await listening(server, client)
            first = await signals.next()
            signals.cancel()
            owner = server.jobs.get("job")
            assert owner is not None
            await eventually(lambda: not owner.state.job.subscribed, server)
            again = await (await client.subscribe()).next()
            assert (again.uuid, again.sequence) == (first.uuid, first.sequence)

    asyncio.run(main())


def test_second_subscriber_replaces_the_first() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            await client.fault(1)
            first = await listening(server, client)
            await first.next()
            async with connected(server.address) as other:
                second = await other.subscribe()
                assert (await second.next()).signalType == "stopTrain"
                with pytest.raises(aio.AioRpcError) as ended:
                    await first.next("never")
                assert ended.value.code() is grpc.StatusCode.ABORTED
                assert await client.stopped() == 0
                assert (await second.next()).signalType == "globalFault"
                await client.fault(2)
                assert (await second.next()).incident == 2
                owner = server.jobs.get("job")
                assert owner is not None
                assert owner.state.job.subscribed

    asyncio.run(main())


def test_keep_alive_comes_within_5_s_and_carries_the_uuid() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            signals = await listening(server, client)
            async with asyncio.timeout(5.0):
                assert (await signals.next("keep-alive")).uuid == ""
            await client.fault(1)
            stop = await signals.next("stopTrain")
            assert (await signals.next("keep-alive")).uuid == stop.uuid

    asyncio.run(main())


def test_subscribing_to_an_unknown_job_is_refused() -> None:
    async def main() -> None:
        async with started() as (_, client):
            info = pb.ClientInfo(jobId="job")
            for call in (
                client.recover.SubscribeProcessManageSignal(info),
                client.recover.SubscribeNotifySwitch(info),
                client.recover.SubscribeNotifyExecStressTest(info),
                client.recover.SubscribeSwitchNicSignal(pb.SwitchNicRequest(jobID="job")),
                client.recover.SubscribeStressTestResponse(pb.StressTestRequest(jobID="job")),
            ):
                with pytest.raises(aio.AioRpcError) as refused:
                    await call.read()
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(main())


def test_the_end_of_the_server_ends_the_streams() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            async with started() as (server, client):
                channel = await stack.enter_async_context(connected(server.address))
                await client.join()
                signals = await channel.subscribe()
                await eventually(lambda: server.jobs.served[JobId("job")].signals.connected, server)
            with pytest.raises((aio.AioRpcError, AssertionError)):
                await signals.next()

    asyncio.run(main())


# Limits and fairness


def test_too_many_calls_of_one_job_are_refused_and_others_are_not() -> None:
    async def main() -> None:
        config = ServerConfig(job_rate=Rate(1, 20))
        async with started(config) as (server, client):
            await client.join()
            codes: list[object] = []
            for _ in range(40):
                try:
                    codes.append(await client.stopped())
                except aio.AioRpcError as error:
                    codes.append(error.code())
            assert codes[:5] == [401] * 5
            assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes
            assert await client.code("HealthCheck") == 0
            async with connected(server.address, job="other") as other:
                await other.join()
                assert await other.fault(1) == 0

    asyncio.run(main())


def test_unknown_callers_of_one_address_share_a_rate() -> None:
    async def main() -> None:
        config = ServerConfig(unknown_caller_rate=Rate(1, 10))
        async with started(config) as (_, client):
            refused = 0
            for number in range(30):
                try:
                    await client.code("Init", pb.ClientInfo(jobId=f"job{number}"))
                except aio.AioRpcError as error:
                    refused += error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refused >= 15

    asyncio.run(main())


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_ipv6_address_counts_as_one_caller_for_all_ports() -> None:
    """Another address is another caller: the address does not end at its first colon."""
    config = ServerConfig(listen="[::]:0", unknown_caller_rate=Rate(0.001, 10))
    apart = [("grpc.use_local_subchannel_pool", 1)]

    async def calls(address: str, number: int) -> list[object]:
        """On their own connection, and so with their own port."""
        codes: list[object] = []
        async with aio.insecure_channel(address, options=apart) as channel:
            for _ in range(number):
                try:
                    codes.append(await Client(channel).code("HealthCheck"))
                except aio.AioRpcError as error:
                    codes.append(error.code())
        return codes

    async def main() -> None:
        async with started(config) as (server, _):
            first = await calls(f"[::1]:{server.port}", 4)
            second = await calls(f"[::1]:{server.port}", 8)
            assert first == [0] * 4
            assert second[0] == 0
            assert second[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await calls(f"127.0.0.1:{server.port}", 4) == [0] * 4

    asyncio.run(main())


def test_flood_of_one_job_does_not_delay_another() -> None:
    async def main() -> None:
        async with started() as (server, client), connected(server.address, job="calm") as calm:
            await client.join()
            await calm.join()
            signals = await listening(server, calm)

            async def flood() -> None:
                rank = 0
                while True:
                    rank += 1
                    try:
                        await client.fault(rank % 1000)
                    except aio.AioRpcError:
                        await asyncio.sleep(0)

            loop = asyncio.get_running_loop()
            floods = [asyncio.ensure_future(flood()) for _ in range(50)]
            took = []
            for rank in range(20):
                began = loop.time()
                assert await calm.fault(rank) == 0
                await signals.next("stopTrain")
                took.append(loop.time() - began)
                assert await calm.stopped() == 0  # so that the next fault starts a round
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)
            # Client, server and flood share this process and its loop: only the order is tested.
            assert sorted(took)[len(took) // 2] < WAIT_S / 30

    asyncio.run(main())


def test_empty_requests_are_answered() -> None:
    async def main() -> None:
        async with started() as (server, client):
            await client.join()
            await listening(server, client)
            await client.fault(1)
            request = pb.StopCompleteRequest(jobId="job")
            assert not request.HasField("status")
            assert await client.code("ReportStopComplete", request) == 0
            empty = pb.RecoverStatusRequest(jobId="job")
            assert await client.code("ReportRecoverStatus", empty) == 401
            assert await client.code("SwitchNicTrack", pb.SwitchNics(jobID="job")) == 413
            assert await client.code("StressTest", pb.StressTestParam(jobID="job")) == 413

    asyncio.run(main())
