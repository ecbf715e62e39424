"""One node's part of a job, put together: bus, zygote, output, watch, and the agent on top.

`taskd run` (`run/launcher.py`) and the torchrun seam (`seams/torchrun.py`) both run this; they
differ in where store and manager are, and in what they do before and after.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import dataclass, field, replace

from taskd.agent.act import ProcessActions
from taskd.agent.main import Agent, Observer, no_observer
from taskd.agent.node_facts import NodeFactsReader
from taskd.agent.node_resources import NodeResources
from taskd.agent.run.plan import PRELOAD, Plan
from taskd.agent.watch import Watch
from taskd.agent.worker_environment import Addresses
from taskd.agent.worker_logs import WorkerLogs
from taskd.agent.worker_output import WorkerOutput
from taskd.agent.zygote.worker_processes import ZygoteLost
from taskd.bus.endpoint import Bus, BusConfig
from taskd.bus.liveness_port import LivenessPort
from taskd.core.agent.lost_manager import Contact
from taskd.core.agent.machine import Done, Node, Waiting, WorkersConfig
from taskd.errors import SettingsError
from taskd.model import messages as m
from taskd.model.agent import Interrupted, ManagerLost, RanksTrain, WarmedUp
from taskd.model.ids import NodeRank, Rank, agent
from taskd.proxy import Proxy
from taskd.runtime.clock import monotonic

log = logging.getLogger(__name__)

BEAT_S, SLOW_RANK_FACTOR = 0.4, 0.3
"""The interval between heartbeats, and how much shorter it is while a rank has no progress."""
MAX_BEATS_PER_S = 250
"""What the manager receives from all nodes together."""
VERDICT_S = 15.0
"""How much longer than the manager a node waits for the permission to start."""


@dataclass
class NodeRun:
    plan: Plan
    resources: NodeResources
    output: WorkerOutput
    proxy: Proxy
    observer: Observer = no_observer
    logs: WorkerLogs = field(init=False)
    bus: Bus = field(init=False)
    agent: Agent = field(init=False)
    liveness_port: LivenessPort | None = field(init=False, default=None)
    opened: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    """Set when bus and liveness port are open."""
    _config: WorkersConfig = field(init=False)
    _contact: Contact = field(init=False, default=Contact())
    _is_lost: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.logs = WorkerLogs(self.plan, self.resources.run_dir)

    async def run(self) -> Done:
        """Run until the node's part of the job is over; nothing of it is left afterwards."""
        plan, address = self.plan, f"127.0.0.1:{self.proxy.port}"
        self.bus = Bus(
            BusConfig(me=agent(plan.node), upstream=address, job=plan.job, token=plan.token)
        )
        await self.bus.start()
        self.liveness_port = await LivenessPort.open(self.proxy.upstream)
        self.opened.set()
        self._config = workers_config(plan, self._permission_s)
        self.agent = Agent(self.bus, self.proxy.bus, self._config, observer=self.observer)
        self._handle_signals()
        failed = Interrupted(
            "stopped because its zygote keeps dying before it is ready", signal.SIGTERM
        )
        self.resources.processes.on_lost = lambda: self.agent.enqueue(failed)
        self.resources.processes.watch()
        try:
            return await self._train()
        finally:
            await self.resources.processes.close()
            await self.bus.close()
            if self.liveness_port is not None:
                self.liveness_port.close()

    @property
    def _permission_s(self) -> float:
        """Longer than the manager waits for all nodes: the manager can name the missing nodes."""
        return self.plan.join_timeout_s + VERDICT_S

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in self.plan.signals:
            because = f"stopped by {signum.name}"
            loop.add_signal_handler(signum, self.agent.enqueue, Interrupted(because, signum))
        if signal.SIGPIPE not in self.plan.signals:
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    async def _train(self) -> Done:
        plan, resources = self.plan, self.resources
        node = Node(NodeRank(plan.node), tuple(map(Rank, plan.ranks)), plan.max_restarts)
        watch, facts = Watch(resources.beacons), NodeFactsReader(resources.beacons)

        self.agent.profiling = watch.profiling.order

        def make_actions(tasks: asyncio.TaskGroup) -> ProcessActions:
            actions = ProcessActions(
                plan,
                resources,
                self.output,
                self.logs,
                Addresses(
                    store=resources.store,
                    proxy=f"127.0.0.1:{self.proxy.port}",
                    liveness_port=self.liveness_port.address
                    if self.liveness_port is not None
                    else "",
                ),
                self.agent,
                tasks,
                watch,
            )
            tasks.create_task(self._wait_until_warm(actions))
            return actions

        def make_beat() -> m.NodeHeartbeat:
            beat = m.NodeHeartbeat(node.node, watch.look(), watch.profiling.look(), facts.changed())
            self._look_for_manager(beat.progress)
            return beat

        def beat_interval_s() -> float:
            return _beat_s(plan.nodes) * (SLOW_RANK_FACTOR if watch.slow else 1.0)

        waiting = Waiting(node, monotonic() + self._permission_s)
        return await self.agent.run(waiting, make_actions, make_beat, beat_interval_s)

    def _look_for_manager(self, progress: tuple[m.Progress, ...]) -> None:
        now, before = monotonic(), self._contact
        self._contact = before.look(self.proxy.bus.joined, progress, now)
        is_lost, was_lost = self._contact.is_lost(now), self._is_lost
        self._is_lost = is_lost
        if is_lost and not was_lost:
            why = f"the job's manager at {self.proxy.upstream} is unreachable, and the ranks wait"
            limit_s = self._config.lost_manager_s
            remedy = "start the launcher there again within %g s, and no step is lost"
            if self.plan.etcd:
                remedy = "no other node leads yet; is etcd running? Waiting for %g s"
            log.warning("%s: " + remedy + "; otherwise this node ends", why, limit_s)
            self.agent.enqueue(ManagerLost(why))
        elif was_lost and not is_lost:
            self.agent.enqueue(RanksTrain())

    async def _wait_until_warm(self, actions: ProcessActions) -> None:
        """Serve the store as soon as the zygote has imported everything."""
        try:
            ready = await self.resources.processes.ready()
        except ZygoteLost:
            return  # `on_lost` has stopped the node
        wanted = [name for name in self.plan.preload if name not in PRELOAD]
        if problems := [f"--preload {n}: {ready.failed[n]}" for n in wanted if n in ready.failed]:
            raise SettingsError(problems)
        await actions.serve_store()
        self.agent.enqueue(WarmedUp())


def workers_config(plan: Plan, permission_s: float) -> WorkersConfig:
    config = WorkersConfig(permission_timeout_s=permission_s, grace_s=plan.grace_s)
    if not plan.etcd:
        return config
    # Any node may lead, as soon as etcd has a majority: that is not the wait for one machine.
    return replace(config, lost_manager_s=config.order_timeout_s)


def _beat_s(nodes: int) -> float:
    """The more nodes, the longer the interval, so that the manager is not flooded."""
    return max(BEAT_S, nodes / MAX_BEATS_PER_S)
