"""Who is let in, who is not, and that the log says who was not."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from taskd.bus.admission import MAX_REASON
from taskd.bus.client import NOT_TRIED
from taskd.bus.endpoint import Bus, BusConfig, Tls
from taskd.bus.security import JOB_KEY, TOKEN_KEY, make_badge, tls_of
from taskd.errors import SettingsError
from taskd.manager.settings import ManagerConfig
from taskd.model.codes import NetCode
from taskd.model.ids import Incident, Position, agent, manager, worker
from taskd.model.messages import EndJob, Park, RestartsLeft, StartWorkers
from taskd.proxy import Proxy, ProxyConfig
from tests.integration.bus.ascend_peers import ascend_client, envelope, message
from tests.integration.bus.bus_nodes import PATIENCE_S, next_of, proxy, running_bus, whole_job
from tests.integration.certificates import Authority

SECRET: dict[str, Any] = {"job": "job-1", "token": "s3cret"}


async def disconnect_reason_of(me: Position, port: int, **settings: object) -> str:
    """Why this one is not let in."""
    bus = Bus(BusConfig(me=me, upstream=f"127.0.0.1:{port}", **settings))  # type: ignore[arg-type]
    await bus.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while bus.disconnect_reason == NOT_TRIED:
                assert not await bus.join(0.05), "it was let in"
        return bus.disconnect_reason
    finally:
        await bus.close()


def test_job_with_a_token_works() -> None:
    async def scenario() -> None:
        async with whole_job(**SECRET) as buses:
            for position, bus in buses.items():
                assert (await buses[manager()].send(position, StartWorkers(1))).code == NetCode.OK
                assert (await bus.send(worker(1, 3), RestartsLeft(1))).code == NetCode.OK

    asyncio.run(scenario())


def test_peer_needs_the_token_of_its_job_and_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, serves=True, **SECRET) as mgr:
            none = await disconnect_reason_of(agent(1), mgr.port)
            assert none.startswith("UNAUTHENTICATED")
            wrong = await disconnect_reason_of(agent(1), mgr.port, job="job-1", token="guess")
            assert wrong.startswith("PERMISSION_DENIED: the token is not for Agent:1")
            other = await disconnect_reason_of(agent(1), mgr.port, job="job-2", token="s3cret")
            assert other.startswith("PERMISSION_DENIED: wrong job")
            nameless = await disconnect_reason_of(agent(1), mgr.port, token="s3cret")
            assert nameless.startswith("PERMISSION_DENIED: wrong job")
            badge = make_badge("s3cret", "job-1", agent(1))
            thief = await disconnect_reason_of(agent(2), mgr.port, job="job-1", token=badge)
            assert thief.startswith("PERMISSION_DENIED: the token is not for Agent:2")
            async with running_bus(agent(1), mgr, job="job-1", token=badge) as agt:
                assert (await agt.send(manager(), RestartsLeft(1))).code == NetCode.OK
            async with ascend_client(agent(3), mgr.port) as stranger:
                for call in (stranger.join(), stranger.send(message(agent(1), manager(), "{}"))):
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        await call
                    assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
                stranger.open()
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stranger.stream.read()
                assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED

    with caplog.at_level(logging.WARNING, "taskd.bus.admission"):
        asyncio.run(scenario())
    for who in ("Agent:1", "Agent:2"):
        assert f"position={who}" in caplog.text
    assert "call refused: peer=ipv4:127.0.0.1:" in caplog.text


def test_peer_cannot_send_from_another_position() -> None:
    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True, **SECRET) as mgr,
            running_bus(agent(1), mgr, **SECRET) as agt,
        ):
            agt._config = replace(agt._config, me=agent(2))
            assert (await agt.send(manager(), RestartsLeft(1))).code == NetCode.ClientErr

    asyncio.run(scenario())


def test_orders_count_only_from_the_manager(caplog: pytest.LogCaptureFixture) -> None:
    """A worker's badge must not end the job of another node, or park another rank."""

    async def scenario() -> None:
        async with whole_job(**SECRET) as buses:
            thief = buses[worker(1, 3)]
            for victim in (agent(0), agent(1), worker(0, 0)):
                for order in (EndJob(0, "done"), Park(Incident(1), "planted")):
                    await thief.send(victim, order)
                assert (await buses[manager()].send(victim, StartWorkers(1))).code == NetCode.OK
                async with asyncio.timeout(10):
                    received = await buses[victim].receive_order()
                assert received.body == StartWorkers(1)

    asyncio.run(scenario())
    assert "EndJob from Worker:1/3 is ignored: only the manager gives orders" in caplog.text


def test_refusals_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger that tries on and on, under a long name."""

    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True, job="job", token="secret") as mgr,
            grpc.aio.insecure_channel(f"127.0.0.1:{mgr.port}") as channel,
        ):
            names = ("role", "W" * 5000), ("serverrank", "0"), ("processrank", "0")
            metadata = (*names, (JOB_KEY, "job"), (TOKEN_KEY, "guess"))
            for _ in range(200):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_unary("/TaskNet/Register", None, None)(
                        b"", metadata=metadata
                    )
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert len(refused.value.details() or "") <= MAX_REASON

    asyncio.run(scenario())
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.msg]
    assert 0 < len(refusals) < 60
    assert max(map(len, refusals)) < 500


def test_all_traffic_works_over_mutual_tls(tmp_path: Path) -> None:
    async def scenario() -> None:
        tls = Authority(tmp_path, "ours").tls("everyone")
        async with whole_job(tls=tls, **SECRET) as buses:
            sent = await buses[manager()].send(worker(1, 3), StartWorkers(1))
            assert sent.code == NetCode.OK
            assert (await next_of(buses[worker(1, 3)])).body == StartWorkers(1)

    asyncio.run(scenario())


def test_certificate_can_bind_its_holder_to_a_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
        bound = ours.tls("one", "taskd://job-1/Agent/1/-1", "taskd://job-1/Worker/1/*")
        server = {"tls": ours.tls("server"), "job": "job-1"}
        async with running_bus(manager(), None, serves=True, **server) as mgr:
            for me in (agent(1), worker(1, 8), worker(1, 9)):
                async with running_bus(me, mgr, tls=bound, job="job-1") as bus:
                    assert (await bus.send(manager(), RestartsLeft(1))).code == NetCode.OK
            for me in (agent(2), worker(2, 8), proxy(1)):
                disconnect_reason = await disconnect_reason_of(me, mgr.port, tls=bound, job="job-1")
                assert disconnect_reason.startswith("PERMISSION_DENIED: the certificate is not for")
            of_other_job = ours.tls("two", "taskd://job-2/Agent/1/-1")
            assert "PERMISSION_DENIED" in await disconnect_reason_of(
                agent(1), mgr.port, tls=of_other_job
            )
            nameless = await disconnect_reason_of(
                agent(1), mgr.port, tls=ours.tls("four"), job="job-1"
            )
            assert "must name its position" in nameless
            stranger = replace(theirs.tls("three"), ca=str(ours.ca))
            for settings in ({}, {"tls": stranger}):
                assert "UNAVAILABLE" in await disconnect_reason_of(agent(1), mgr.port, **settings)

    with caplog.at_level(logging.WARNING, "taskd.bus.admission"):
        asyncio.run(scenario())
    assert "position=Worker:2/8" in caplog.text


def test_proxy_uses_tls_upstream_and_none_on_the_loopback(tmp_path: Path) -> None:
    async def scenario() -> None:
        ours = Authority(tmp_path, "ours")
        server = {"tls": ours.tls("server"), "job": "job-1"}
        named = ours.tls("node", "taskd://job-1/Proxy/1/*")
        async with running_bus(manager(), None, serves=True, **server) as mgr:
            config = ProxyConfig(
                server_rank=1,
                listen="127.0.0.1:0",
                upstream=f"127.0.0.1:{mgr.port}",
                job="job-1",
                tls=named,
            )
            async with Proxy(config) as below, running_bus(worker(1, 8), below.bus) as rank:
                assert await below.bus.join(PATIENCE_S)
                assert (await mgr.send(worker(1, 8), StartWorkers(1))).code == NetCode.OK
                assert (await next_of(rank)).body == StartWorkers(1)

    asyncio.run(scenario())


def test_tls_can_be_set_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ProxyConfig().tls is None
    monkeypatch.setenv("TASKD_TLS_CA", "ca.pem")
    monkeypatch.setenv("TASKD_TLS_CLIENT_KEY", "key.pem")
    wanted = Tls(ca="ca.pem", client_key="key.pem")
    assert (ProxyConfig().tls, ManagerConfig(job_id="job").tls) == (wanted, wanted)
    assert tls_of({"enable_tls": True, "tls_conf": {"ca": "other"}}) == Tls(ca="other")
    with pytest.raises(SettingsError, match="tls_conf with ca, client_crt"):
        tls_of({"enable_tls": True, "tls_conf": {"certificate": "x"}})


def test_listening_without_tls_logs_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_bus(manager(), None, listen="127.0.0.1:0"):
            pass
        tls = Authority(tmp_path, "ours").tls("server")
        async with running_bus(manager(), None, listen="0.0.0.0:0", tls=tls):
            pass
        assert not caplog.records
        async with running_bus(manager(), None, listen="0.0.0.0:0"):
            pass

    with caplog.at_level(logging.WARNING, "taskd"):
        asyncio.run(scenario())
    [record] = caplog.records
    assert "without TLS" in record.message


def test_all_unreadable_files_are_reported_at_once(tmp_path: Path) -> None:
    tls = Tls(ca=str(tmp_path / "no-ca"), server_key=str(tmp_path / "no-key"), server_crt="")
    bus = Bus(BusConfig(me=manager(), listen="127.0.0.1:0", tls=tls))
    with pytest.raises(SettingsError) as raised:
        asyncio.run(bus.start())
    assert len(raised.value.problems) == 3


def test_badge_is_not_enough_to_serve_children() -> None:
    badge = make_badge("s3cret", "job-1", proxy(1))
    with pytest.raises(SettingsError, match="needs the job's secret"):
        BusConfig(me=proxy(1), listen="127.0.0.1:0", job="job-1", token=badge)


def test_body_does_not_change_the_sender() -> None:
    """Without TLS any registration is believed. That is why the warning exists."""

    async def scenario() -> None:
        async with (
            running_bus(manager(), None, serves=True) as mgr,
            ascend_client(agent(0), mgr.port) as anyone,
        ):
            await anyone.join()
            ack = await anyone.send(message(agent(5), manager(), envelope("REGISTER", 0)))
            assert ack.code == NetCode.OK

    asyncio.run(scenario())
