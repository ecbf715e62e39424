"""The agent's actions: turns the commands of `core/agent` into processes, signals and messages."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from taskd.agent import script_result
from taskd.agent.node_resources import NodeResources
from taskd.agent.run.plan import Plan
from taskd.agent.watch import Watch, WorkerKey
from taskd.agent.worker_environment import Addresses, worker_environment
from taskd.agent.worker_logs import WorkerLogs
from taskd.agent.worker_output import WorkerOutput
from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.agent.zygote.worker_processes import Exit, Process, StartRefused, ZygoteLost
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
    Interrupted,
    KillWorker,
    PrepareStandby,
    RenewStore,
    SendHello,
    SendToManager,
    SignalWorker,
    StartWorker,
    WorkerStarted,
    WorkerStartFailed,
)
from taskd.model.ids import NodeRank

if TYPE_CHECKING:
    from taskd.agent.main import Agent

log = logging.getLogger(__name__)

DRAIN_S = 0.5
"""How long the report of an exit waits for the last lines of the worker's output."""
STANDBY_DELAY_S = 1.0
"""A standby is prepared this long after the last start, so that it does not delay that start."""


def _no_stacks() -> None:
    """A spawned program has no handler that writes its stacks."""


def start_task(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    """Unless this process ends: then it starts nothing more, and no peer reads its reports."""
    try:
        tasks.create_task(work)
    except RuntimeError:
        work.close()


class ProcessActions:
    """Carries out the machine's commands on processes that come from our own zygote."""

    def __init__(
        self,
        plan: Plan,
        resources: NodeResources,
        output: WorkerOutput,
        logs: WorkerLogs,
        addresses: Addresses,
        agent: Agent,
        tasks: asyncio.TaskGroup,
        watch: Watch,
    ) -> None:
        self._plan, self._resources, self._output, self._logs = plan, resources, output, logs
        self._processes, self._addresses, self._watch = resources.processes, addresses, watch
        self._agent, self._tasks = agent, tasks
        self._workers: dict[WorkerKey, Process] = {}
        self._store: Process | None = None
        self._stores = 0
        self._standby_timer: asyncio.TimerHandle | None = None

    async def perform(self, command: Command) -> None:
        match command:
            case StartWorker():
                start_task(self._tasks, self._start(command))
            case KillWorker(rank, incarnation):
                if (process := self._workers.get((rank, incarnation))) is not None:
                    self._processes.kill(process)
            case SignalWorker(rank, incarnation, signum):
                if (process := self._workers.get((rank, incarnation))) is not None:
                    # A stopped process handles no signal before it continues.
                    self._processes.send_signal(process, signum)
                    self._processes.send_signal(process, signal.SIGCONT)
            case PrepareStandby():
                self._prepare_standby_later()
            case RenewStore():
                # Forked workers need no new store: their keys contain the attempt
                # (`zygote/torch_store.py`), and workers of another node may already use the
                # store. Spawned workers do not have that prefix.
                if self._plan.spawn:
                    await self.serve_store()
            case SendToManager(body):
                await self._agent.send_to_manager(body)
            case SendHello(workers, attempt, remaining, condemned, shards):
                served = self._resources.served_store
                node, host = NodeRank(self._plan.node), socket.gethostname()
                state = workers, served, attempt, remaining
                more = self._addresses.liveness_port, self._processes.warm, condemned, shards
                await self._agent.send_to_manager(m.AgentHello(node, host, *state, *more))

    def _prepare_standby_later(self) -> None:
        self.close()
        self._standby_timer = asyncio.get_running_loop().call_later(
            STANDBY_DELAY_S, lambda: start_task(self._tasks, self._prepare_standby())
        )

    async def _prepare_standby(self) -> None:
        sibling = max((process.pid for process in self._workers.values()), default=0)
        reports = [str(self._logs.files(*key).devices) for key in self._workers]
        await self._processes.prepare_standby(sibling, reports)

    def close(self) -> None:
        if self._standby_timer is not None:
            self._standby_timer.cancel()

    async def serve_store(self) -> None:
        """Start an empty store on the port that all ranks know, in place of any earlier one."""
        listener = self._resources.listener
        if listener is None:
            return
        if self._store is not None:
            self._processes.kill(self._store)
            self._store = None
        host, _, port = self._resources.served_store.rpartition(":")
        renewed, self._stores = self._stores > 0, self._stores + 1
        while self._store is None:
            try:
                self._store = await self._processes.serve_store(
                    host, int(port), listener.fileno(), renewed, self._on_store_exit
                )
            except ZygoteLost as error:
                if self._processes.given_up:
                    return  # the node stops
                log.warning("torch store not started: %s; trying the next zygote", error)

    def _on_store_exit(self, exited: Exit) -> None:
        if self._store != exited.process:
            return
        self._store = None
        if exited.exit_code:
            # It was not killed: it has raised an error, as would the next one.
            because = "stopped because torch's store cannot be served: its error is above"
            self._agent.enqueue(Interrupted(because, signal.SIGTERM))
            return
        log.error("torch store died: signal=%s; starting a new one", exited.signal)
        start_task(self._tasks, self.serve_store())

    async def _start(self, start: StartWorker) -> None:
        key = start.rank, start.incarnation
        files = self._logs.files(*key)
        env = worker_environment(self._plan, start, self._addresses)
        env |= {
            "TORCHELASTIC_ERROR_FILE": str(files.error),
            "TASKD_STACK_FILE": str(files.stacks),
            "TASKD_RESULT_FILE": str(files.result),
            "TASKD_DEVICES_FILE": str(files.devices),
            "TASKD_BEACON": self._watch.beacon(key),
            "TASKD_PROFILING_PROBE": self._watch.profiling.prepare(key),
        }
        ends = self._logs.open(start, self._output)
        try:
            process = await self._processes.start(
                f"rank{start.rank}",
                env,
                ends[0],
                ends[1],
                lambda exited: self._on_exit(start, exited),
            )
        except (StartRefused, ZygoteLost) as error:
            self._output.close(key, 0)
            self._agent.enqueue(WorkerStartFailed(*key, str(error)))
            return
        finally:
            for end in ends:
                os.close(end)
        self._workers[key] = process
        ask = functools.partial(self._processes.send_signal, process, STACK_SIGNAL)
        self._watch.add(key, process.pid, files.stacks, ask if not self._plan.spawn else _no_stacks)
        self._agent.enqueue(WorkerStarted(*key, process.pid))

    def _on_exit(self, start: StartWorker, exited: Exit) -> None:
        start_task(self._tasks, self._report(start, exited))

    async def _report(self, start: StartWorker, exited: Exit) -> None:
        key = start.rank, start.incarnation
        tail = await asyncio.to_thread(self._output.close, key, DRAIN_S)
        self._workers.pop(key, None)
        step = self._watch.remove(key)
        evidence = self._logs.evidence(start, tail) if exited.exit_code != 0 else ""
        pid, result = exited.process.pid, script_result.read(self._logs.files(*key).result)
        self._agent.enqueue(
            m.WorkerExited(
                *key,
                pid,
                exited.exit_code,
                exited.signal,
                evidence,
                script_ended=result.ended,
                error=result.error if exited.exit_code != 0 else None,
                step=step,
            )
        )
