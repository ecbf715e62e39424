"""The proxy as other people's processes use it: one call to start, one to stop, in any order."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from taskd import proxy
from taskd.errors import Permanent, SettingsError
from taskd.model.codes import NetCode
from taskd.model.ids import Position, agent, manager
from taskd.model.messages import RestartsLeft, StartWorkers
from taskd.proxy import ProxyConfig
from taskd.runtime.address import free_port
from taskd.runtime.loop_thread import LoopThread
from tests.integration.bus.bus_nodes import PATIENCE_S, next_of, running_bus


@pytest.fixture(autouse=True)
def _stopped() -> Iterator[None]:
    yield
    proxy.stop()


def test_proxy_starts_once_forwards_and_can_be_stopped_twice() -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, serves=True) as mgr:
            listen = f"127.0.0.1:{free_port()}"
            config = ProxyConfig(server_rank=4, listen=listen, upstream=f"localhost:{mgr.port}")
            for _ in range(2):
                assert await asyncio.to_thread(proxy.start, config, timeout_s=PATIENCE_S)
            async with running_bus(agent(4), None, upstream=listen) as agt:
                assert (await agt.send(manager(), RestartsLeft(1))).code == NetCode.OK
                assert (await mgr.send(agent(4), StartWorkers(1))).code == NetCode.OK
                assert (await next_of(agt)).body == StartWorkers(1)
                itself = await mgr.send(Position("Proxy", "4"), StartWorkers(1))
                assert itself.code == NetCode.OK
            for _ in range(2):
                await asyncio.to_thread(proxy.stop)

    asyncio.run(scenario())


def test_proxy_that_cannot_listen_leaves_nothing_running() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        config = ProxyConfig(
            listen=f"127.0.0.1:{occupied.getsockname()[1]}", upstream="127.0.0.1:1"
        )
        for _ in range(2):
            with pytest.raises(SettingsError, match="cannot listen"):
                proxy.start(config)


def test_proxy_can_be_stopped_while_it_connects() -> None:
    config = ProxyConfig(listen="127.0.0.1:0", upstream="127.0.0.1:1")
    joined: list[bool] = []
    starting = threading.Thread(target=lambda: joined.append(proxy.start(config)))
    starting.start()
    while proxy._running is None and starting.is_alive():
        starting.join(0.01)
    proxy.stop()
    starting.join(PATIENCE_S)
    assert joined == [False]


def test_proxy_settings_are_the_documented_keys() -> None:
    assert ProxyConfig.of({}, {}) == ProxyConfig(server_rank=0)
    given = {"ListenPort": 1, "UpstreamAddr": "boss", "UpstreamPort": "2", "ServerRank": "3"}
    assert ProxyConfig.of(given, {}) == ProxyConfig(
        server_rank=3, listen="127.0.0.1:1", upstream="boss:2"
    )
    assert ProxyConfig.of({}, {"RANK": "5", "MS_NODE_RANK": "6"}).server_rank == 5
    assert ProxyConfig.of(given, {"LOCAL_PROXY_ENABLE": "on"}).upstream == "127.0.0.1:2"
    assert ProxyConfig.of({"UpstreamAddr": "::1"}, {}).upstream == "[::1]:9601"
    for wrong in ({"ListenPort": "x"}, {"ListenPort": 99999}, {"ServerRank": "-1"}):
        with pytest.raises(SettingsError):
            ProxyConfig.of(wrong, {})


def test_loop_thread_refuses_work_after_a_fork() -> None:
    async def answer() -> int:
        return 42

    thread = LoopThread()
    assert thread.run(answer()).result(PATIENCE_S) == 42
    child = os.fork()
    if child == 0:
        try:
            thread.run(answer())
        except Permanent:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    thread.stop()
    thread.stop()
    with pytest.raises(Permanent, match="stopped"):
        thread.run(answer())
