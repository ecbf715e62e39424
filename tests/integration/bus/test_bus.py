"""The bus over real gRPC: every kind of message between every kind of role."""

from __future__ import annotations

import asyncio
import socket

import pytest

from taskd.bus.client import NOT_TRIED
from taskd.bus.endpoint import Bus, BusConfig, PeerJoined
from taskd.errors import Permanent, SettingsError
from taskd.model.codes import NetCode
from taskd.model.ids import (
    ALL,
    EVERY_AGENT,
    EVERY_WORKER,
    Position,
    Role,
    agent,
    manager,
    worker,
)
from taskd.model.messages import ExitAgent, RestartsLeft, SetProfiling, StartWorkers, Unknown
from tests.integration.bus.ascend_peers import ascend_client
from tests.integration.bus.bus_nodes import (
    PATIENCE_S,
    bodies_of,
    next_of,
    proxy,
    running_bus,
    until_change,
    whole_job,
)


def test_message_goes_through_a_proxy_and_its_answer_comes_back() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(proxy(1), mgr, serves=True) as prx,
            running_bus(worker(1, 9), prx) as wrk,
        ):
            sent = await mgr.send(worker(1, 9), StartWorkers(3))
            assert (sent.code, sent.source) == (NetCode.OK, worker(1, 9))
            got = await next_of(wrk)
            assert (got.src, got.body) == (manager(), StartWorkers(3))

            sent = await wrk.send(manager(), RestartsLeft(2))
            assert (sent.code, sent.source) == (NetCode.OK, manager())
            assert (await next_of(mgr)).body == RestartsLeft(2)

    asyncio.run(scenario())


def test_all_processes_reach_each_other() -> None:
    """Also an agent its own node's workers, and a worker a worker of another node."""

    async def scenario() -> None:
        async with whole_job() as buses:
            for sender in buses.values():
                for position, receiver in buses.items():
                    sent = await sender.send(position, RestartsLeft(1))
                    assert sent.code == NetCode.OK, (sender.me, position, sent)
                    assert (await next_of(receiver)).src == sender.me

    asyncio.run(scenario())


def test_broadcast_reaches_each_process_once() -> None:
    async def scenario() -> None:
        async with whole_job(nodes=3, ranks=3) as buses:
            workers = [bus for position, bus in buses.items() if position.role == Role.WORKER]
            agents = [bus for position, bus in buses.items() if position.role == Role.AGENT]
            mgr = buses[manager()]
            assert (await mgr.send(EVERY_WORKER, SetProfiling(True, False))).code == NetCode.OK
            assert (await mgr.send(EVERY_AGENT, ExitAgent())).code == NetCode.OK
            node_1 = Position(Role.WORKER, "1", ALL)
            assert (await agents[0].send(node_1, SetProfiling(False, True))).code == NetCode.OK
            # What comes last shows that nothing more was on its way.
            for position in buses:
                assert (await mgr.send(position, StartWorkers(0))).code == NetCode.OK
            for bus in workers:
                expected = [SetProfiling(True, False), StartWorkers(0)]
                if bus.me.server_rank == "1":
                    [got] = await bodies_of([bus], 3)
                    assert sorted(map(str, got)) == sorted(
                        map(str, [*expected, SetProfiling(False, True)])
                    )
                else:
                    assert await bodies_of([bus], 2) == [expected]
            assert await bodies_of(agents, 2) == [[ExitAgent(), StartWorkers(0)]] * 3

    asyncio.run(scenario())


def test_list_of_ranks_reaches_each_of_them() -> None:
    async def scenario() -> None:
        async with whole_job(nodes=3, ranks=2) as buses:
            listed = Position(Role.WORKER, "0,2", "1,4,5")
            sent = await buses[manager()].send(listed, StartWorkers(5))
            assert sent.code == NetCode.OK
            chosen = [buses[position] for position in (worker(0, 1), worker(2, 4), worker(2, 5))]
            assert await bodies_of(chosen) == [[StartWorkers(5)]] * 3

            agents = Position(Role.AGENT, "1,2")
            assert (await buses[worker(0, 0)].send(agents, RestartsLeft(5))).code == NetCode.OK
            assert await bodies_of([buses[agent(1)], buses[agent(2)]]) == [[RestartsLeft(5)]] * 2

    asyncio.run(scenario())


def test_several_levels_of_proxies() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            running_bus(proxy(100), mgr, serves=True) as row,
            running_bus(proxy(10), row, serves=True) as rack,
            running_bus(proxy(0), rack, serves=True) as node,
            running_bus(worker(0, 0), node) as wrk,
            running_bus(proxy(1), rack, serves=True) as other_node,
            running_bus(worker(1, 1), other_node) as other,
        ):
            for sender, receiver in ((mgr, wrk), (wrk, mgr), (wrk, other), (other, node)):
                sent = await sender.send(receiver.me, RestartsLeft(1))
                assert sent.code == NetCode.OK, (sender.me, receiver.me, sent)
                assert (await next_of(receiver)).src == sender.me
            assert (await mgr.send(EVERY_WORKER, StartWorkers(1))).code == NetCode.OK
            assert await bodies_of([wrk, other]) == [[StartWorkers(1)]] * 2

    asyncio.run(scenario())


def test_many_concurrent_sends_keep_order_and_lose_nothing() -> None:
    async def scenario() -> None:
        async with whole_job(nodes=1, ranks=1) as buses:
            mgr, wrk = buses[manager()], buses[worker(0, 0)]
            for number in range(3000):
                assert (await mgr.send(wrk.me, StartWorkers(number), sync=False)).code == NetCode.OK
            [got] = await bodies_of([wrk], 3000)
            assert got == [StartWorkers(number) for number in range(3000)]

    asyncio.run(scenario())


def test_failure_has_the_code_and_the_position_of_the_hop() -> None:
    async def scenario() -> None:
        async with whole_job(nodes=1, ranks=1) as buses:
            mgr = buses[manager()]
            unreached = await mgr.send(agent(7), ExitAgent())
            assert (unreached.code, unreached.source) == (NetCode.NoRoute, manager())
            from_below = await buses[worker(0, 0)].send(worker(0, 5), ExitAgent())
            assert (from_below.code, from_below.source) == (NetCode.NoRoute, manager())

            for dst, code in (
                (Position("Boss", "0"), NetCode.DstRoleIllegal),
                (Position(Role.AGENT, "x"), NetCode.DstSrvRankIllegal),
                (Position(Role.WORKER, "0", "-1"), NetCode.DstProcessRankIllegal),
            ):
                assert (await mgr.send(dst, ExitAgent())).code == code
            huge = Unknown("ACTION", 9, "x" * (9 << 20))
            assert (await mgr.send(worker(0, 0), huge)).code == NetCode.ClientErr
            large = Unknown("ACTION", 9, "x" * (7 << 20))
            assert (await mgr.send(worker(0, 0), large)).code == NetCode.OK
            assert (await next_of(buses[worker(0, 0)])).body == large

    asyncio.run(scenario())


def test_same_uuid_twice_is_delivered_once_and_acknowledged_twice() -> None:
    async def scenario() -> None:
        async with whole_job(nodes=1, ranks=1) as buses:
            mgr, wrk = buses[manager()], buses[worker(0, 0)]
            for _ in range(2):
                assert (await mgr.send(wrk.me, StartWorkers(1), uuid="same")).code == NetCode.OK
            assert (await mgr.send(wrk.me, StartWorkers(2))).code == NetCode.OK
            assert await bodies_of([wrk], 2) == [[StartWorkers(1), StartWorkers(2)]]

    asyncio.run(scenario())


def test_port_in_use_is_a_settings_error() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as occupied:
            address = f"127.0.0.1:{occupied.getsockname()[1]}"
            with pytest.raises(SettingsError, match=f"cannot listen on {address}"):
                await Bus(BusConfig(me=manager(), listen=address)).start()
        async with running_bus(manager(), None, serves=True) as mgr:
            second = Bus(BusConfig(me=manager(), listen=f"127.0.0.1:{mgr.port}"))
            with pytest.raises(SettingsError, match="cannot listen"):
                await second.start()

    asyncio.run(scenario())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_names_ipv4_and_ipv6_are_addresses(host: str) -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, listen=f"{host}:0") as mgr,
            running_bus(agent(0), None, upstream=f"{host}:{mgr.port}") as agt,
        ):
            assert (await agt.send(manager(), RestartsLeft(1))).code == NetCode.OK

    asyncio.run(scenario())


def test_send_without_upstream_connection_fails() -> None:
    async def scenario() -> None:
        lonely = Bus(BusConfig(me=agent(0), upstream="127.0.0.1:1"))
        await lonely.start()
        sent = await lonely.send(manager(), RestartsLeft(1))
        assert (sent.code, sent.source) == (NetCode.ServerErr, agent(0))
        async with asyncio.timeout(PATIENCE_S):
            while lonely.disconnect_reason == NOT_TRIED:
                assert not await lonely.join(0.05)
        assert "UNAVAILABLE" in lonely.disconnect_reason
        await lonely.close()

    asyncio.run(scenario())


def test_all_invalid_settings_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as raised:
        BusConfig(me=Position("Boss", "0"), listen="nowhere", upstream="here:99999")
    assert len(raised.value.problems) == 3


def test_messages_sent_before_close_arrive() -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, serves=True) as mgr:
            for number in range(20):
                async with running_bus(agent(0), mgr) as agt:
                    await agt.send(manager(), RestartsLeft(number), sync=False)
                assert (await next_of(mgr)).body == RestartsLeft(number)

    asyncio.run(scenario())


def test_closed_bus_refuses_calls() -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, serves=True) as mgr:
            receiving = asyncio.create_task(mgr.receive())
            watching = mgr.changes()
            await mgr.close()
            await mgr.close()
            with pytest.raises(Permanent, match="closed"):
                await receiving
            assert [change async for change in watching] == []
            assert (await mgr.send(agent(0), ExitAgent())).code == NetCode.ServerErr

    asyncio.run(scenario())


def test_waiting_send_gets_a_result_when_its_bus_closes() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(agent(3), mgr.port) as silent,
        ):
            await silent.join()
            await until_change(mgr, PeerJoined(agent(3)))
            sending = asyncio.create_task(mgr.send(agent(3), StartWorkers(1), timeout_s=100.0))
            await silent.receive()
            await mgr.close()
            assert (await sending).code == NetCode.ServerErr

    asyncio.run(scenario())
