"""The event loop of `taskd run`: connects proxy, agent, zygote and the manager's supervisor.

`run_command.py` has started what is slow; here it is connected, supervised, and stopped at the end.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from taskd.agent.main import Observer
from taskd.agent.node import NodeRun
from taskd.agent.run.beside.dashboard_process import DashboardProcess
from taskd.agent.run.elastic_events import EventLog
from taskd.agent.run.plan import Plan
from taskd.agent.run.run_command import LOOPBACK, Started, say
from taskd.agent.run.summary import Summary, hint, read_incidents
from taskd.agent.run.supervisor import CannotStart, Supervisor
from taskd.agent.worker_output import WorkerOutput
from taskd.config import environ
from taskd.core.agent.machine import Done, State, Waiting
from taskd.errors import EtcdLostAtStart, JobElsewhere, TaskdError
from taskd.model.agent import Event
from taskd.proxy import Proxy, ProxyConfig
from taskd.runtime.clock import wall

if TYPE_CHECKING:
    from taskd.agent.run.beside.checkpoint_process import CheckpointProcess
    from taskd.agent.run.leader_follower import LeaderFollower
    from taskd.core.election import Term


def launch(plan: Plan, started: Started) -> int:
    output = WorkerOutput()
    launcher = _Launcher(plan, started, output)
    try:
        done = asyncio.run(launcher.run())
    except asyncio.CancelledError:
        if not launcher.terminated:
            raise
        return 128 + signal.SIGTERM
    finally:
        output.stop()
    return done.exit_code


@dataclass
class _Launcher:
    plan: Plan
    started: Started
    output: WorkerOutput
    terminated: bool = False
    """By SIGTERM, which is not among the signals that end the job: only this node ends."""
    _dashboard: DashboardProcess | None = None
    _follower: LeaderFollower | None = None
    _checkpoints: CheckpointProcess | None = None
    _begun: bool = False
    """Whether ranks have run on this node."""

    async def run(self) -> Done:
        plan, summary = self.plan, Summary(wall)
        if signal.SIGTERM not in plan.signals:
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate, task)
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
        observers: list[Observer] = [summary.observe]
        if plan.events:
            event_log = EventLog(plan, lambda line: sys.stderr.write(line + "\n"), wall)
            observers.append(event_log.observe)

        def observe(event: Event, before: State, after: State) -> None:
            self._begun = self._begun or not isinstance(after, Waiting)
            for observer in observers:
                observer(event, before, after)

        node = NodeRun(plan, self.started.resources, self.output, proxy, observe)
        done, leaves = None, False
        try:
            done = await self._train(node)
            trouble = proxy.bus.disconnect_reason
        except (JobElsewhere, EtcdLostAtStart):
            leaves = True
            raise
        finally:
            await proxy.close()
            if self._checkpoints is not None:
                await self._checkpoints.stop(done is not None and done.exit_code == 0)
            if self.started.supervisor is not None:
                # The manager exits once every node has left, and ours has just left.
                follower = self._follower
                leaves = leaves or self.terminated
                leads = not leaves and (follower is None or follower.leads)
                await self.started.supervisor.stop(self._manager_exit_s if leads else 0.0)
            if self.started.member is not None:
                await self.started.member.stop(0.0)
            if self._dashboard is not None:
                self._dashboard.stop()
        kept = self._follower.incidents if self._follower is not None else []
        incidents = read_incidents(self.started.state_dir, kept)
        for line in [*summary.lines(done, trouble, incidents), *hint(incidents, plan)]:
            say(line)
        return done

    def _terminate(self, task: asyncio.Task[Any]) -> None:
        if not self.terminated:
            self.terminated = True
            task.cancel()

    @property
    def _manager_exit_s(self) -> float:
        return 5.0 if self.plan.nodes == 1 else 5.0 + self.plan.grace_s

    async def _announce(self, proxy: Proxy) -> None:
        """Say how to look at the job, once the manager answers: then `taskd status` can find it."""
        if await proxy.bus.join(self.plan.join_timeout_s):
            ranks, nodes = self.plan.world_size, self.plan.nodes
            size = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
            say(f"job {self.plan.job}, {size}; to see its state: taskd status {self.plan.job}")
            if self.plan.dashboard:
                plan = self.plan
                self._dashboard = DashboardProcess(plan.job, plan.dashboard, plan.clusterd, environ)
                self._dashboard.start()

    async def _keep_member(self, member: Supervisor) -> None:
        """The other nodes have copies of the job's state, too, unless this one starts them all."""
        try:
            await member.keep_running()
        except CannotStart as error:
            if self.started.starts_etcd and not self._begun:
                raise EtcdLostAtStart(str(error), do_without=True) from error
            say(f"this node keeps no copy of the job's state any more: {error}")

    def _leader_changed(self, term: Term) -> None:
        if term.epoch > 1:
            say(f"node {term.node} leads the job since epoch {term.epoch}")

    async def _train(self, node: NodeRun) -> Done:
        background: list[Coroutine[Any, Any, None]] = []
        if self.started.supervisor is not None:
            background.append(self.started.supervisor.keep_running())
            if self.plan.node == 0:
                background.append(self._announce(node.proxy))
        if self.started.etcd is not None:
            from taskd.agent.run.leader_follower import LeaderFollower, watch_start
            from taskd.clusterd.etcd.job_terms import job_prefix

            self._follower = LeaderFollower(self.started.etcd, node, self._leader_changed)
            if self.plan.starts_etcd and not self.plan.spare:
                prefix = job_prefix(self.plan.job, self.plan.token)
                starts = self.started.starts_etcd
                background.append(
                    watch_start(self.started.etcd, prefix, lambda: self._begun, starts)
                )
            if self.started.supervisor is not None:
                self.started.supervisor.newest = self._follower.manager_arguments
            background.append(self._follower.run())
        if (without := self.started.without_etcd) is not None:
            background.append(
                without.keep_telling(lambda: not node.proxy.bus.joined, lambda: self._begun)
            )
        if self.plan.checkpoint_every:
            from taskd.agent.run.beside.checkpoint_process import CheckpointProcess

            beacons = self.started.resources.beacons
            self._checkpoints = CheckpointProcess(self.plan, beacons, say)
            background.append(self._checkpoints.keep_running())
        if self.started.member is not None:
            background.append(self._keep_member(self.started.member))
        try:
            async with asyncio.TaskGroup() as tasks:
                helpers = [tasks.create_task(work) for work in background]
                done = await node.run()
                for task in helpers:
                    task.cancel()
        except* TaskdError as group:
            raise _first_error(group) from None
        return done


def _first_error(group: BaseExceptionGroup[TaskdError]) -> TaskdError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, TaskdError)
    return error
