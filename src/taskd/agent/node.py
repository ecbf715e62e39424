"""One node's part of a job, put together: bus, zygote, output, beacons, and the agent over them.

`taskd run` (`launcher.py`) and the torchrun seam (`torchrun.py`) both run this; they differ in
where store and manager are, and in what they do before and after.
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field

from taskd.agent.act import Hands
from taskd.agent.main import Agent, Seer, unseen
from taskd.agent.run.plan import PRELOAD, Plan
from taskd.agent.run_folders import Ground
from taskd.agent.watch import Watch
from taskd.agent.worker_environment import Addresses
from taskd.agent.worker_logs import Logs
from taskd.agent.worker_output import Output
from taskd.agent.zygote.worker_processes import ZygoteLost
from taskd.bus.endpoint import Bus, BusConfig
from taskd.bus.liveness_port import Door
from taskd.core.agent.machine import Done, Node, Waiting, WorkersConfig
from taskd.errors import SettingsError
from taskd.model import messages as m
from taskd.model.agent import Interrupted, WarmedUp
from taskd.model.ids import NodeRank, Rank, agent
from taskd.proxy import Proxy
from taskd.runtime.clock import monotonic

BEAT_S, HURRY = 0.4, 0.3
"""How often a heart beats, and how much sooner while a rank stands still."""
MOST_BEATS_PER_S = 250
VERDICT_S = 15.0


@dataclass
class NodeRun:
    plan: Plan
    ground: Ground
    output: Output
    proxy: Proxy
    seer: Seer = unseen
    logs: Logs = field(init=False)
    bus: Bus = field(init=False)
    agent: Agent = field(init=False)
    door: Door | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.logs = Logs(self.plan, self.ground.run_dir)

    async def run(self) -> Done:
        """Until the node's part of the job is over; then nothing of it is left."""
        plan, address = self.plan, f"127.0.0.1:{self.proxy.port}"
        self.bus = Bus(
            BusConfig(me=agent(plan.node), upstream=address, job=plan.job, token=plan.token)
        )
        await self.bus.start()
        self.door = await Door.open(self.proxy.upstream)
        config = WorkersConfig(permission_timeout_s=self._permission_s, grace_s=plan.grace_s)
        self.agent = Agent(self.bus, self.proxy.bus, config, watch=self.seer)
        self._obey_signals()
        hopeless = Interrupted("the zygote dies before it is ready", signal.SIGTERM)
        self.ground.nursery.on_lost = lambda: self.agent.happened(hopeless)
        self.ground.nursery.watch()
        try:
            return await self._train()
        finally:
            await self.ground.nursery.close()
            await self.bus.close()
            if self.door is not None:
                self.door.close()

    @property
    def _permission_s(self) -> float:
        """Longer than the manager waits for all nodes: it can say who did not come."""
        return self.plan.join_timeout_s + VERDICT_S

    def _obey_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in self.plan.signals:
            because = f"stopped by {signum.name}"
            loop.add_signal_handler(signum, self.agent.happened, Interrupted(because, signum))
        if signal.SIGPIPE not in self.plan.signals:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    async def _train(self) -> Done:
        plan, ground = self.plan, self.ground
        node = Node(NodeRank(plan.node), tuple(map(Rank, plan.ranks)), plan.max_restarts)
        watch = Watch(ground.beacons)

        self.agent.profiling = watch.probes.order

        def hands(tasks: asyncio.TaskGroup) -> Hands:
            made = Hands(
                plan,
                ground,
                self.output,
                self.logs,
                Addresses(
                    store=ground.store,
                    proxy=f"127.0.0.1:{self.proxy.port}",
                    door=self.door.address if self.door is not None else "",
                ),
                self.agent,
                tasks,
                watch,
            )
            tasks.create_task(self._warm(made))
            return made

        def look() -> m.NodeHeartbeat:
            return m.NodeHeartbeat(node.node, watch.look(), watch.probes.look())

        def pace_s() -> float:
            return _beat_s(plan.nodes) * (HURRY if watch.uneasy else 1.0)

        waiting = Waiting(node, monotonic() + self._permission_s)
        return await self.agent.run(waiting, hands, look, pace_s)

    async def _warm(self, hands: Hands) -> None:
        """Once the zygote has imported everything, the store can be served from it."""
        try:
            ready = await self.ground.nursery.ready()
        except ZygoteLost:
            return await self._warm(hands)
        wanted = [name for name in self.plan.preload if name not in PRELOAD]
        if problems := [f"--preload {n}: {ready.failed[n]}" for n in wanted if n in ready.failed]:
            raise SettingsError(problems)
        await hands.serve_store()
        self.agent.happened(WarmedUp())


def _beat_s(nodes: int) -> float:
    """The more nodes, the rarer the beats: the manager hears some hundreds a second at most."""
    return max(BEAT_S, nodes / MOST_BEATS_PER_S)
