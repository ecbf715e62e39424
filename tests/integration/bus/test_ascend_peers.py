"""Half of the bus is Ascend's: both sides of every method, as the reference describes them."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from taskd.bus.endpoint import PeerJoined
from taskd.model.codes import NetCode
from taskd.model.ids import EVERY_AGENT, Position, Role, agent, manager, worker
from taskd.model.messages import AgentRegistered, RestartsLeft, StartWorkers, Unknown
from taskd.wire._pb import tasknet_pb2 as pb
from taskd.wire.bus_frames import position_from_pb, position_to_pb
from tests.integration.bus.ascend_peers import ascend_client, ascend_server, envelope, message
from tests.integration.bus.bus_nodes import (
    PATIENCE_S,
    bodies_of,
    next_of,
    proxy,
    running_bus,
    until_change,
    until_delivered,
)

GO = envelope("ACTION", 210, "5")


def test_our_proxy_and_worker_under_an_ascend_manager() -> None:
    async def scenario() -> None:
        async with (
            ascend_server(manager()) as boss,
            running_bus(proxy(1), None, upstream=f"127.0.0.1:{boss.port}", serves=True) as prx,
            running_bus(worker(1, 9), prx) as wrk,
        ):
            sent = await wrk.send(manager(), RestartsLeft(3))
            assert (sent.code, sent.source) == (NetCode.OK, manager())
            got = await boss.got.get()
            assert position_from_pb(got.header.src) == worker(1, 9)
            assert position_from_pb(got.header.dst) == manager()

            async with asyncio.timeout(PATIENCE_S):
                await boss.opened.wait()
            ack = await boss.send(message(manager(), worker(1, 9), GO, uuid="a"))
            assert ack is not None
            assert (ack.uuid, ack.code) == ("a", 0)
            assert position_from_pb(ack.src) == worker(1, 9)
            # An async message gets no Ack: the next one is that of the next sync message.
            await boss.send(message(manager(), worker(1, 9), GO, uuid="b", sync=False))
            boss.routes[worker(1, 10)] = prx.me
            unreached = await boss.send(message(manager(), worker(1, 10), GO, uuid="c"))
            assert unreached is not None
            assert (unreached.uuid, unreached.code) == ("c", NetCode.NoRoute)
            assert position_from_pb(unreached.src) == prx.me
            assert await bodies_of([wrk], 2) == [[StartWorkers(5)] * 2]

            boss.refuse = grpc.StatusCode.UNKNOWN
            assert (await wrk.send(manager(), RestartsLeft(3))).code == NetCode.NetErr

    asyncio.run(scenario())


def test_restarted_ascend_manager_gets_all_paths_again() -> None:
    async def scenario() -> None:
        async with ascend_server(manager()) as first:
            up = f"127.0.0.1:{first.port}"
            port = first.port
            joined = running_bus(proxy(1), None, upstream=up, serves=True)
            prx = await joined.__aenter__()
            leaf = running_bus(agent(1), prx)
            agt = await leaf.__aenter__()
            assert first.routes == {prx.me: prx.me, agent(1): prx.me}
        async with ascend_server(manager(), port) as second:
            async with asyncio.timeout(PATIENCE_S):
                await second.opened.wait()
            assert second.registered == [prx.me]
            assert second.routes == {prx.me: prx.me, agent(1): prx.me}
            await until_delivered(lambda: agt.send(manager(), RestartsLeft(1)))
            await leaf.__aexit__(None, None, None)
            await joined.__aexit__(None, None, None)

    asyncio.run(scenario())


def test_order_of_one_source_is_kept_towards_an_ascend_server() -> None:
    async def scenario() -> None:
        async with (
            ascend_server(manager()) as boss,
            running_bus(agent(0), None, upstream=f"127.0.0.1:{boss.port}") as agt,
        ):
            for number in range(50):
                await agt.send(manager(), RestartsLeft(number), sync=False)
            async with asyncio.timeout(PATIENCE_S):
                got = [(await boss.got.get()).body for _ in range(50)]
            assert [f'"{number}"' in body for number, body in enumerate(got)] == [True] * 50

    asyncio.run(scenario())


@pytest.mark.parametrize("through_proxy", [False, True])
def test_ascend_agent_under_our_manager(through_proxy: bool) -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(proxy(3), mgr, serves=True) as prx,
            ascend_client(agent(3), (prx if through_proxy else mgr).port) as agt,
        ):
            await agt.join()
            ack = await agt.send(message(agent(3), manager(), envelope("REGISTER", 0)))
            assert (ack.uuid, ack.code) == ("u1", 0)
            assert position_from_pb(ack.src) == manager()
            assert (await next_of(mgr)).body == AgentRegistered()
            above = prx if through_proxy else mgr
            await until_change(above, PeerJoined(agent(3)))

            sending = asyncio.create_task(mgr.send(agent(3), StartWorkers(5)))
            got = await agt.receive()
            assert got.header.sync
            await agt.acknowledge(got)
            assert (await sending).source == agent(3)

            await mgr.send(EVERY_AGENT, StartWorkers(6))
            assert not (await agt.receive()).header.sync

            # An error code in its Ack is not a success, and a wrong uuid is not an answer.
            sending = asyncio.create_task(mgr.send(agent(3), StartWorkers(5)))
            got = await agt.receive()
            stray = message(agent(3), manager(), "", uuid="stray")
            await agt.acknowledge(stray)
            await agt.acknowledge(got, NetCode.RecvBufBusy)
            sent = await sending
            assert (sent.code, sent.source) == (NetCode.RecvBufBusy, agent(3))

            silent = await mgr.send(agent(3), StartWorkers(5), timeout_s=3.0)
            assert (silent.code, silent.source) == (NetCode.NetworkAckLost, above.me)

    asyncio.run(scenario())


def test_ascend_proxy_that_does_not_announce_itself_relays_for_its_children() -> None:
    async def scenario() -> None:
        me = Position(Role.PROXY, "2", "1735689600")
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(me, mgr.port) as prx,
        ):
            await prx.join()
            path = [position_to_pb(agent(2)), position_to_pb(me)]
            request = pb.PathDiscoveryReq(uuid="x", proxyPos=position_to_pb(me), path=path)
            assert (await prx.stub.PathDiscovery(request)).code == 0
            await prx.send(message(agent(2), manager(), envelope("REGISTER", 0)))
            assert (await next_of(mgr)).src == agent(2)
            await until_change(mgr, PeerJoined(me))
            sending = asyncio.create_task(mgr.send(agent(2), StartWorkers(5)))
            got = await prx.receive()
            assert position_from_pb(got.header.dst) == agent(2)
            await prx.acknowledge(got)
            assert (await sending).code == NetCode.OK

    asyncio.run(scenario())


def test_children_of_an_ascend_proxy_are_found_again_by_their_messages() -> None:
    """It announces each child only once, so a restarted manager must learn where they are."""

    async def scenario() -> None:
        me = Position(Role.PROXY, "2", "1735689600")
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(me, mgr.port) as prx,
        ):
            await prx.stub.Register(pb.RegisterReq(uuid="r", pos=position_to_pb(me)))
            prx.open()
            await until_change(mgr, PeerJoined(me))
            assert (await mgr.send(agent(2), StartWorkers(5))).code == NetCode.NoRoute
            await prx.send(message(agent(2), manager(), envelope("KEEP_ALIVE", 0)))
            sending = asyncio.create_task(mgr.send(agent(2), StartWorkers(5)))
            await prx.acknowledge(await prx.receive())
            assert (await sending).code == NetCode.OK

    asyncio.run(scenario())


def test_failed_delivery_is_a_grpc_error_for_ascend_clients() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(agent(3), mgr.port) as agt,
            running_bus(agent(4), mgr) as other,
        ):
            await agt.join()
            with pytest.raises(grpc.aio.AioRpcError, match="5002") as raised:
                await agt.send(message(agent(3), worker(9, 9), GO))
            assert raised.value.code() == grpc.StatusCode.UNKNOWN
            ack = await agt.send(message(agent(3), EVERY_AGENT, GO, sync=True, uuid="many"))
            assert (ack.uuid, ack.code) == ("many", 0)
            assert await bodies_of([other]) == [[Unknown("ACTION", 210, "5")]]

    asyncio.run(scenario())


def test_second_registration_ends_the_first_stream() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(agent(3), mgr.port) as first,
            ascend_client(agent(3), mgr.port) as second,
        ):
            await first.join()
            await until_change(mgr, PeerJoined(agent(3)))
            await second.join()
            with pytest.raises(grpc.aio.AioRpcError, match="newer stream"):
                await first.stream.read()
            sending = asyncio.create_task(mgr.send(agent(3), StartWorkers(1), sync=False))
            assert (await sending).code == NetCode.OK
            await second.receive()

    asyncio.run(scenario())


def test_concurrent_streams_of_one_child_leave_one() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(agent(3), mgr.port) as agt,
        ):
            await agt.join()
            streams = [agt.stream]
            for _ in range(20):
                agt.open()
                streams.append(agt.stream)
            ended = [asyncio.create_task(stream.read()) for stream in streams]
            done, left = await asyncio.wait(
                ended, timeout=PATIENCE_S, return_when="FIRST_EXCEPTION"
            )
            while len(left) > 1:
                more, left = await asyncio.wait(left, return_when="FIRST_COMPLETED")
                done |= more
            assert {task.exception().code() for task in done} == {grpc.StatusCode.ABORTED}  # type: ignore[union-attr]
            assert (await mgr.send(agent(3), StartWorkers(1), sync=False)).code == NetCode.OK
            [last] = left
            async with asyncio.timeout(PATIENCE_S):
                assert isinstance(await last, pb.Message)

    asyncio.run(scenario())
