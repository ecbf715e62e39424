"""An agent inside a framework's process: joins the manager and uses the framework's functions.

`msrun.py` and `pytorch_callbacks.py` bring the functions; `framework_actions.py` calls them.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass

from taskd.agent.main import Agent
from taskd.agent.seams.framework_actions import LOOK_S, Framework, FrameworkActions
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
    """Which node the agent runs on, and how it reaches the manager."""

    node: int = 0
    """The rank of the node that the agent runs on."""
    upstream: str = ""
    """host:port of an existing proxy. Empty: the agent runs its own."""
    manager: str = "127.0.0.1"
    """The manager's host, if the agent runs its own proxy."""
    join_timeout_s: float = 180.0
    """How long to wait for the manager."""
    farewell_s: float = 10.0
    """How long a node whose workers have finished waits for the other nodes."""
    settle_all_s: float = 60.0
    """How long MindSpore's scheduler needs to forget dead workers before all are restarted."""
    settle_some_s: float = 15.0
    """The same before some of them are restarted."""

    @property
    def workers(self) -> WorkersConfig:
        """Ascend's manager orders no end: a node that has finished must not wait long for one."""
        return WorkersConfig(farewell_s=self.farewell_s, in_ascends_words=True)


async def join_and_train(
    config: AgentConfig,
    framework: Framework,
    ranks: tuple[Rank, ...],
    restarts: int,
    signals: tuple[signal.Signals, ...] = (),
) -> Done:
    """Join the manager, through our own proxy or an existing one, and run the node's part.

    `signals` stop it in an orderly way, where the framework has no handlers of its own.
    """
    proxy = await _proxy(config)
    upstream = config.upstream or f"127.0.0.1:{proxy.port if proxy else 0}"
    job, token = membership(environ)
    bus = Bus(BusConfig(me=agent(config.node), upstream=upstream, job=job, token=token))
    await bus.start()
    nearest = bus if proxy is None else proxy.bus
    try:
        if not await nearest.join(config.join_timeout_s):
            waited = f"no manager answered within {config.join_timeout_s:g} s"
            raise ValueError(f"{waited}: {nearest.disconnect_reason}")
        node = Node(NodeRank(config.node), ranks, restarts)
        member = Agent(bus, nearest, config.workers)
        for signum in signals:
            ending = Interrupted(f"stopped by {signum.name}", signum)
            asyncio.get_running_loop().add_signal_handler(signum, member.enqueue, ending)
        return await _train(framework, member, node, config.workers)
    finally:
        await bus.close()
        if proxy is not None:
            await proxy.close()


async def _proxy(config: AgentConfig) -> Proxy | None:
    if config.upstream:
        return None
    settings = {"UpstreamAddr": config.manager, "ServerRank": str(config.node)}
    return await started(settings, environ)


async def _train(framework: Framework, member: Agent, node: Node, workers: WorkersConfig) -> Done:
    def make_actions(tasks: asyncio.TaskGroup) -> FrameworkActions:
        return FrameworkActions(node.node, framework, member, tasks)

    def make_beat() -> NodeHeartbeat:
        return NodeHeartbeat(node.node, ())

    waiting = Waiting(node, monotonic() + workers.permission_timeout_s)
    return await member.run(waiting, make_actions, make_beat, lambda: LOOK_S)
