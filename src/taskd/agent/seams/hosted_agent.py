"""An agent that is a guest in a framework's process: joins the manager, works with lent hands.

`msrun.py` and `ptrun.py` bring the framework's functions; `called.py` uses them.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from taskd.agent.main import Agent
from taskd.agent.seams.callbacks import LOOK_S, CalledHands, Framework
from taskd.bus.endpoint import Bus, BusConfig
from taskd.bus.security import membership
from taskd.config import environ
from taskd.core.agent.machine import Done, Node, Waiting, WorkersConfig
from taskd.model.agent import Interrupted
from taskd.model.ids import NodeRank, Rank, agent
from taskd.model.messages import NodeHeartbeat
from taskd.proxy import Proxy, started
from taskd.runtime.clock import monotonic


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Where the agent stands and whom it talks to."""

    node: int = 0
    upstream: str = ""
    """host:port of a proxy that others run. Empty: the agent runs its own."""
    manager: str = "127.0.0.1"
    """The manager's host, for a proxy of our own."""
    join_timeout_s: float = 180.0
    """How long the manager may take to be there."""
    farewell_s: float = 10.0
    """How long a node whose workers have finished waits for the others."""
    settle_all_s: float = 60.0
    """How long MindSpore's scheduler needs to forget dead workers before all start anew."""
    settle_some_s: float = 15.0
    """The same before some of them start anew."""


async def join_and_train(
    config: AgentConfig,
    framework: Framework,
    ranks: tuple[Rank, ...],
    restarts: int,
    workers: WorkersConfig,
    signals: tuple[signal.Signals, ...] = (),
) -> Done:
    """Join the manager, over our own proxy or another's, and run the node's part of the job.

    The signals end it in good order, where the framework has no handlers of its own.
    """
    proxy = await _proxy(config)
    upstream = config.upstream or f"127.0.0.1:{proxy.port if proxy else 0}"
    job, token = membership(environ)
    bus = Bus(BusConfig(me=agent(config.node), upstream=upstream, job=job, token=token))
    await bus.start()
    way = bus if proxy is None else proxy.bus
    try:
        if not await way.join(config.join_timeout_s):
            waited = f"no manager in {config.join_timeout_s:g} s"
            raise ValueError(f"{waited}: {way.trouble}")
        node = Node(NodeRank(config.node), ranks, restarts)
        told = Agent(bus, way, workers)
        for signum in signals:
            ending = Interrupted(f"ended by {signum.name}", signum)
            asyncio.get_running_loop().add_signal_handler(signum, told.happened, ending)
        return await _train(framework, told, node, workers)
    finally:
        await bus.close()
        if proxy is not None:
            await proxy.close()


async def _proxy(config: AgentConfig) -> Proxy | None:
    if config.upstream:
        return None
    told = {"UpstreamAddr": config.manager, "ServerRank": str(config.node)}
    return await started(told, environ)


async def _train(framework: Framework, told: Agent, node: Node, workers: WorkersConfig) -> Done:
    def hands(tasks: asyncio.TaskGroup) -> CalledHands:
        return CalledHands(node.node, framework, told, tasks)

    def look() -> NodeHeartbeat:
        return NodeHeartbeat(node.node, ())

    waiting = Waiting(node, monotonic() + workers.permission_timeout_s)
    return await told.run(waiting, hands, look, lambda: LOOK_S)
