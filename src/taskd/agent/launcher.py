"""The event loop of `taskd run`: joins proxy, agent, zygote and the manager's supervisor.

`launch.py` has started what is slow; here it is put together, watched, and taken down again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass

from taskd.agent.act import Hands
from taskd.agent.environment import Addresses
from taskd.agent.launch import LOOPBACK, Ground, say
from taskd.agent.logs import Logs
from taskd.agent.main import Agent
from taskd.agent.output import Output
from taskd.agent.plan import PRELOAD, Plan
from taskd.agent.summary import Summary, read_incidents
from taskd.agent.watch import Watch
from taskd.core.workers import Node, Over, Waiting, WorkersConfig
from taskd.edge.bus import Bus, BusConfig
from taskd.edge.clock import monotonic, wall
from taskd.errors import SettingsError, TaskdError
from taskd.model import messages as m
from taskd.model.ids import NodeRank, Rank, agent
from taskd.model.workers import Interrupted
from taskd.proxy import Proxy, ProxyConfig

log = logging.getLogger(__name__)

BEAT_S = 0.25
MOST_BEATS_PER_S = 250


def launch(plan: Plan, ground: Ground) -> int:
    output = Output()
    try:
        over = asyncio.run(_Launcher(plan, ground, output).run())
    finally:
        output.stop()
    return over.exit_code


@dataclass
class _Launcher:
    plan: Plan
    ground: Ground
    output: Output

    async def run(self) -> Over:
        summary = Summary(wall)
        proxy, bus = await self._join()
        config = WorkersConfig(
            permission_timeout_s=self.plan.join_timeout_s, grace_s=self.plan.grace_s
        )
        agent_ = Agent(bus, proxy.bus, config, watch=summary.see)
        self._obey_signals(agent_)
        try:
            over = await self._train(agent_, proxy)
            trouble = proxy.bus.trouble or bus.trouble
        finally:
            await self.ground.nursery.close()
            await bus.close()
            await proxy.close()
            if self.ground.supervisor is not None:
                # The manager ends once every node has left; ours just has.
                await self.ground.supervisor.stop(self._farewell_s)
        for line in summary.lines(over, trouble, read_incidents(self.ground.state_dir)):
            say(line)
        return over

    @property
    def _farewell_s(self) -> float:
        return 5.0 if self.plan.nodes == 1 else 5.0 + self.plan.grace_s

    async def _join(self) -> tuple[Proxy, Bus]:
        plan = self.plan
        proxy = Proxy(
            ProxyConfig(
                server_rank=plan.node,
                listen=f"{LOOPBACK}:0",
                upstream=self.ground.manager,
                job=plan.job,
                token=plan.token,
            )
        )
        await proxy.start()
        bus = Bus(
            BusConfig(
                me=agent(plan.node),
                upstream=f"{LOOPBACK}:{proxy.port}",
                job=plan.job,
                token=plan.token,
            )
        )
        await bus.start()
        return proxy, bus

    async def _say_where(self, proxy: Proxy) -> None:
        """Once there is something to see: the manager has announced where before it answers."""
        if await proxy.bus.join(self.plan.join_timeout_s):
            ranks = f"{self.plan.world_size} ranks on {self.plan.nodes} nodes"
            say(f"job {self.plan.job}, {ranks}; look with `taskd status {self.plan.job}`")

    def _obey_signals(self, told: Agent) -> None:
        loop = asyncio.get_running_loop()
        for signum in self.plan.signals:
            because = f"stopped by {signum.name}"
            loop.add_signal_handler(signum, told.happened, Interrupted(because, signum))
        if signal.SIGPIPE not in self.plan.signals:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    async def _warm(self, hands: Hands) -> None:
        """Once the zygote has imported everything, the store can be served from it."""
        ready = await self.ground.nursery.ready()
        wanted = [name for name in self.plan.preload if name not in PRELOAD]
        if problems := [f"--preload {n}: {ready.failed[n]}" for n in wanted if n in ready.failed]:
            raise SettingsError(problems)
        await hands.serve_store()

    async def _train(self, told: Agent, proxy: Proxy) -> Over:
        plan, ground = self.plan, self.ground
        node = Node(NodeRank(plan.node), tuple(map(Rank, plan.ranks)), plan.max_restarts)
        addresses = Addresses(store=ground.store, proxy=f"{LOOPBACK}:{proxy.port}")
        logs, watch = Logs(plan, ground.run_dir), Watch(ground.beacons)
        ground.nursery.watch()

        def hands(tasks: asyncio.TaskGroup) -> Hands:
            made = Hands(
                plan,
                ground.nursery,
                self.output,
                logs,
                addresses,
                ground.listener,
                told.tell,
                told.happened,
                tasks,
                watch,
            )
            tasks.create_task(self._warm(made))
            return made

        def progress() -> m.NodeBeat:
            return m.NodeBeat(node.node, watch.look())

        try:
            async with asyncio.TaskGroup() as tasks:
                beside = []
                if ground.supervisor is not None:
                    beside = [ground.supervisor.keep(), self._say_where(proxy)]
                helping = [tasks.create_task(work) for work in beside]
                waiting = Waiting(node, monotonic() + plan.join_timeout_s)
                over = await told.run(waiting, hands, progress, _beat_s(plan.nodes))
                for task in helping:
                    task.cancel()
        except* TaskdError as group:
            raise _first(group) from None
        return over


def _beat_s(nodes: int) -> float:
    """The more nodes, the rarer the beats: the manager hears some hundreds a second at most."""
    return max(BEAT_S, nodes / MOST_BEATS_PER_S)


def _first(group: BaseExceptionGroup[TaskdError]) -> TaskdError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TaskdError)
    return error
