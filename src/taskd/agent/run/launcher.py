"""The event loop of `taskd run`: joins proxy, agent, zygote and the manager's supervisor.

`launch.py` has started what is slow; here it is put together, watched, and taken down again.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass

from taskd.agent.main import Seer
from taskd.agent.node import NodeRun
from taskd.agent.run.command import LOOPBACK, Started, say
from taskd.agent.run.elastic_events import EventLog
from taskd.agent.run.job_account import read_incidents
from taskd.agent.run.plan import Plan
from taskd.agent.run.summary import Summary
from taskd.agent.worker_output import Output
from taskd.core.agent.machine import Done, State
from taskd.errors import TaskdError
from taskd.model.agent import Event
from taskd.proxy import Proxy, ProxyConfig
from taskd.runtime.clock import wall


def launch(plan: Plan, started: Started) -> int:
    output = Output()
    try:
        over = asyncio.run(_Launcher(plan, started, output).run())
    finally:
        output.stop()
    return over.exit_code


@dataclass
class _Launcher:
    plan: Plan
    started: Started
    output: Output

    async def run(self) -> Done:
        plan, summary = self.plan, Summary(wall)
        proxy = Proxy(
            ProxyConfig(
                server_rank=plan.node,
                listen=f"{LOOPBACK}:0",
                upstream=self.started.manager,
                job=plan.job,
                token=plan.token,
            )
        )
        await proxy.start()
        seers: list[Seer] = [summary.see]
        if plan.events:
            seers.append(EventLog(plan, lambda line: sys.stderr.write(line + "\n"), wall).see)

        def see(event: Event, before: State, after: State) -> None:
            for each in seers:
                each(event, before, after)

        node = NodeRun(plan, self.started.ground, self.output, proxy, see)
        try:
            over = await self._train(node)
            trouble = proxy.bus.trouble
        finally:
            await proxy.close()
            if self.started.supervisor is not None:
                # The manager ends once every node has left; ours just has.
                await self.started.supervisor.stop(self._farewell_s)
        for line in summary.lines(over, trouble, read_incidents(self.started.state_dir)):
            say(line)
        return over

    @property
    def _farewell_s(self) -> float:
        return 5.0 if self.plan.nodes == 1 else 5.0 + self.plan.grace_s

    async def _say_where(self, proxy: Proxy) -> None:
        """Once there is something to see: the manager has announced where before it answers."""
        if await proxy.bus.join(self.plan.join_timeout_s):
            ranks, nodes = self.plan.world_size, self.plan.nodes
            size = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
            say(f"job {self.plan.job}, {size}; look with `taskd status {self.plan.job}`")

    async def _train(self, node: NodeRun) -> Done:
        beside = []
        if self.started.supervisor is not None:
            beside = [self.started.supervisor.keep(), self._say_where(node.proxy)]
        try:
            async with asyncio.TaskGroup() as tasks:
                helping = [tasks.create_task(work) for work in beside]
                over = await node.run()
                for task in helping:
                    task.cancel()
        except* TaskdError as group:
            raise _first(group) from None
        return over


def _first(group: BaseExceptionGroup[TaskdError]) -> TaskdError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TaskdError)
    return error
