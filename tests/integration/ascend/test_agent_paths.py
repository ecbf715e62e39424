"""The documented Python layer of agents: its names, messages on a real bus, refused settings."""

from __future__ import annotations

import asyncio
import queue
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from taskd.api import init_taskd_agent, register_func, start_taskd_agent
from taskd.bus.endpoint import Bus, BusConfig
from taskd.model.ids import agent, manager
from taskd.model.messages import AgentRegistered, RanksFailed, StopWorkers
from taskd.python.framework.agent.base_agent import agent_network
from taskd.python.framework.agent.base_agent.base_agent import STATUS_MSG_TYPE, BaseAgent
from taskd.python.framework.agent.ms_agent.ms_agent import MsAgent
from taskd.python.framework.agent.pt_agent.pt_agent import PtAgent, get_fault_workers, get_pids
from taskd.python.framework.common.type import (
    AgentReportInfo,
    MsgBody,
    NetworkConfig,
    Position,
)
from taskd.runtime.address import free_port
from taskd.runtime.loop_thread import LoopThread

DEADLINE_S = 30.0


def test_agent_and_manager_exchange_messages() -> None:
    thread, port = LoopThread("test"), free_port()

    async def serve() -> Bus:
        created = Bus(BusConfig(me=manager(), listen=f"127.0.0.1:{port}"))
        await created.start()
        return created

    bus = thread.run(serve()).result(DEADLINE_S)
    inbox: queue.Queue[MsgBody] = queue.Queue()
    config = NetworkConfig(Position("Agent", "1", "-1"), f"127.0.0.1:{port}", "", False, None)
    network = agent_network.AgentMessageManager(config, inbox)
    try:
        joined = network._thread.run(network.get_network_instance().join(DEADLINE_S))
        assert joined.result(DEADLINE_S)
        network.register("1")
        assert thread.run(bus.receive()).result(DEADLINE_S).body == AgentRegistered()
        base = BaseAgent()
        base.send_message_to_manager(STATUS_MSG_TYPE, 202, AgentReportInfo(fault_ranks=[3]))
        body = thread.run(bus.receive()).result(DEADLINE_S).body
        assert isinstance(body, RanksFailed)
        assert body.ranks == (3,)
        threading.Thread(target=network.receive_message, daemon=True).start()
        sent = thread.run(bus.send(agent(1), StopWorkers((3,))))  # type: ignore[arg-type]
        assert sent.result(DEADLINE_S)
        assert inbox.get(timeout=DEADLINE_S) == MsgBody("ACTION", 213, '["3"]', {})
    finally:
        network.close()
        asyncio.run_coroutine_threadsafe(bus.close(), thread._loop).result(DEADLINE_S)
        thread.stop()


def test_unknown_command_raises_type_error() -> None:
    base = BaseAgent()
    base.msg_queue.put(MsgBody("ACTION", 999, "", {}))
    with pytest.raises(TypeError):
        base.handle_message()


def test_base_agent_leaves_worker_actions_to_subclasses() -> None:
    base, message = BaseAgent(), MsgBody("ACTION", 210, "", {})
    for work in (base.initialize_workers, base.stop_workers, base.exit_agent, base.restart_workers):
        with pytest.raises(NotImplementedError):
            work(message)
    assert base.check_new_fault([1])
    assert not base.is_report_timeout()


def test_pids_and_faulty_part_of_a_worker_group() -> None:
    contexts = {0: SimpleNamespace(pids=lambda: {0: 7}), 2: SimpleNamespace(pids=lambda: {0: 9})}
    assert get_pids(contexts) == {0: 7, 2: 9}

    class Worker:
        def __init__(self, rank: int) -> None:
            self.global_rank = rank

    workers = [Worker(rank) for rank in range(4)]
    part: Any = get_fault_workers(SimpleNamespace(workers=workers, store="s"), [1, 3])
    assert {worker.global_rank for worker in part.workers} == {1, 3}
    assert part.store == "s"
    assert callable(MsAgent.start)
    assert callable(PtAgent.invoke_run)


@pytest.mark.parametrize(
    ("config", "env"),
    [
        ({}, {}),
        ({"Framework": "pytorch"}, {}),
        ({"Framework": "PyTorch"}, {}),
        ({"Framework": "MindSpore", "UpstreamAddr": "no-ip"}, {}),
        ({"Framework": "MindSpore"}, {"MS_NODE_RANK": "first"}),
        ({"Framework": "MindSpore", "ServerRank": "0"}, {"MS_NODE_RANK": "first"}),
        ({"Framework": "MindSpore", "UpstreamPort": "high"}, {}),
        ({"Framework": "MindSpore", "UpstreamPort": "70000"}, {}),
        ({"Framework": "MindSpore", "UpstreamPort": "9²"}, {}),
        ({"Framework": "MindSpore", "ServerRank": "²"}, {}),
        ({"Framework": ["PyTorch"]}, {}),
        ("MindSpore", {}),
        ([], {}),
        (None, {}),
    ],
)
def test_invalid_agent_settings_are_refused(
    config: Any, env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.agent.seams.agent_api._agent", None)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert init_taskd_agent(config) is False
    assert register_func("MONITOR", print) is False
    assert start_taskd_agent() is None


def test_callback_that_is_not_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("taskd.agent.seams.agent_api._agent", None)
    assert init_taskd_agent({"Framework": "MindSpore"}) is True
    assert register_func("MONITOR", "print") is False  # type: ignore[arg-type]
    assert register_func("MONITOR", print) is True
