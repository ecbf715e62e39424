"""`init_taskd_proxy` and `destroy_taskd_proxy` with a real manager and agent."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from taskd.api import destroy_taskd_proxy, init_taskd_proxy
from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.bus import PeerJoined
from taskd.model.codes import NetCode
from taskd.model.ids import agent, manager
from taskd.model.messages import AgentRegistered
from taskd.runtime.address import free_port
from taskd.runtime.loop_thread import LoopThread

WAIT_S = 20.0


class Job:
    """A manager, and an agent that joins through the proxy, in their own event loop."""

    def __init__(self, manager_port: int = 0, token: str = "") -> None:
        self.loop = LoopThread("test")
        self.token = token
        self.manager = self.loop.run(self._start_manager(manager_port)).result(WAIT_S)

    async def _start_manager(self, port: int) -> Bus:
        job = "job-1" if self.token else ""
        bus = Bus(BusConfig(me=manager(), listen=f"127.0.0.1:{port}", job=job, token=self.token))
        await bus.start()
        return bus

    async def next_peer(self) -> str:
        async with asyncio.timeout(WAIT_S):
            async for change in self.manager.changes():
                if isinstance(change, PeerJoined):
                    return str(change.peer).partition("/")[0]
        raise AssertionError("no peer joined")

    async def hello_through(self, proxy_port: int) -> NetCode:
        bus = Bus(BusConfig(me=agent(3), upstream=f"127.0.0.1:{proxy_port}"))
        await bus.start()
        assert await bus.join(WAIT_S)
        sent = await bus.send(manager(), AgentRegistered())
        await bus.close()
        return sent.code

    def close(self) -> None:
        self.loop.run(self.manager.close()).result(WAIT_S)
        self.loop.stop()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "MS_NODE_RANK", "LOCAL_PROXY_ENABLE", "TASKD_TOKEN", "TASKD_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert destroy_taskd_proxy() is True


@pytest.fixture
def job() -> Iterator[Job]:
    running = Job()
    yield running
    running.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("port_type", [int, str])
def test_init_returns_true_when_the_proxy_has_joined(job: Job, host: str, port_type: type) -> None:
    port = free_port()
    config = {
        "ListenAddr": "127.0.0.1",
        "ListenPort": port_type(port),
        "UpstreamAddr": host,
        "UpstreamPort": port_type(job.manager.port),
        "ServerRank": port_type(3),
    }
    assert init_taskd_proxy(config) is True
    assert job.loop.run(job.next_peer()).result(WAIT_S) == "Proxy:3"
    assert job.loop.run(job.hello_through(port)).result(WAIT_S) is NetCode.OK


def test_second_call_keeps_the_first_proxy(job: Job) -> None:
    config = {"ListenPort": free_port(), "UpstreamPort": job.manager.port}
    assert init_taskd_proxy(config) is True
    assert init_taskd_proxy({"ListenPort": 1, "UpstreamPort": 1}) is True
    assert destroy_taskd_proxy() is True
    assert destroy_taskd_proxy() is True
    assert init_taskd_proxy(config) is True


def test_init_waits_for_a_late_manager() -> None:
    upstream = free_port()
    with ThreadPoolExecutor() as pool:
        joined = pool.submit(init_taskd_proxy, {"ListenPort": 0, "UpstreamPort": upstream})
        late = Job(upstream)
        assert joined.result(WAIT_S) is True
        late.close()


def test_destroy_ends_the_wait() -> None:
    port = free_port()
    answers: list[bool] = []
    waiting = threading.Thread(
        target=lambda: answers.append(
            init_taskd_proxy({"ListenPort": port, "UpstreamPort": free_port()})
        )
    )
    waiting.start()
    _wait_for_listener(port)
    assert destroy_taskd_proxy() is True
    waiting.join(WAIT_S)
    assert answers == [False]


def _wait_for_listener(port: int) -> None:
    tries = threading.Event()
    for _ in range(400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        tries.wait(0.05)
    raise AssertionError(f"no process listens on port {port}")


def test_port_in_use_returns_false_and_leaves_no_proxy(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = {"ListenPort": port, "UpstreamPort": job.manager.port}
        assert init_taskd_proxy(config) is False
        assert init_taskd_proxy(config) is False
    assert init_taskd_proxy(config) is True


@pytest.mark.parametrize(
    "config",
    [
        {"ListenPort": "many"},
        {"UpstreamPort": 70000},
        {"UpstreamPort": "0"},
        {"ListenAddr": "224.0.0.1"},
        {"ListenAddr": "no host", "ListenPort": 0},
        {"ServerRank": "-1"},
        {"ServerRank": "one"},
        {"enable_tls": True},
        {"enable_tls": True, "tls_conf": {"ca": "/absent", "server_key": "x", "server_crt": "y"}},
        {"enable_tls": True, "tls_conf": {"certificate": "x"}},
    ],
)
def test_invalid_settings_return_false(config: dict[str, object]) -> None:
    assert init_taskd_proxy({"ListenPort": 0, **config}) is False


@pytest.mark.parametrize("config", [[("ListenPort", 0)], [], 7, "x"])
def test_settings_that_are_not_a_dict_return_false(config: object) -> None:
    assert init_taskd_proxy(config) is False  # type: ignore[arg-type]


def test_server_rank_is_read_from_the_environment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MS_NODE_RANK", "5")
    config = {"ListenPort": 0, "UpstreamPort": job.manager.port}
    assert init_taskd_proxy(config) is True
    assert job.loop.run(job.next_peer()).result(WAIT_S) == "Proxy:5"
    destroy_taskd_proxy()


def test_server_rank_zero_overrides_the_environment(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    config = {"ListenPort": 0, "UpstreamPort": job.manager.port, "ServerRank": 0}
    assert init_taskd_proxy(config) is True
    assert job.loop.run(job.next_peer()).result(WAIT_S) == "Proxy:0"
    destroy_taskd_proxy()


def test_token_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = Job(token="secret")
    monkeypatch.setenv("TASKD_TOKEN", "secret")
    monkeypatch.setenv("MINDX_TASK_ID", "job-1")
    assert init_taskd_proxy({"ListenPort": 0, "UpstreamPort": guarded.manager.port}) is True
    guarded.close()


def test_destroy_without_a_proxy_returns_true() -> None:
    assert destroy_taskd_proxy() is True
