"""The agent's hands: turns the commands of `core/agent` into processes, signals and messages."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

from taskd.agent.run.plan import Plan
from taskd.agent.run_folders import Ground
from taskd.agent.watch import Watch
from taskd.agent.worker_environment import Addresses, of_worker
from taskd.agent.worker_logs import Logs
from taskd.agent.worker_output import Output
from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.agent.zygote.worker_processes import Death, Process, StartRefused, ZygoteLost
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
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
from taskd.model.ids import Incarnation, NodeRank, Rank

if TYPE_CHECKING:
    from taskd.agent.main import Agent

log = logging.getLogger(__name__)

DRAIN_S = 0.5
"""How long a death report waits for the last lines of the worker's output."""
REST_S = 1.0
"""How long after its last start a node has better things to do than to prepare for the next."""

Life = tuple[Rank, Incarnation]


def _no_stacks() -> None:
    """A spawned program has not been taught to write them."""


class Hands:
    def __init__(
        self,
        plan: Plan,
        ground: Ground,
        output: Output,
        logs: Logs,
        addresses: Addresses,
        agent: Agent,
        tasks: asyncio.TaskGroup,
        watch: Watch,
    ) -> None:
        self._plan, self._ground, self._output, self._logs = plan, ground, output, logs
        self._nursery, self._addresses, self._watch = ground.nursery, addresses, watch
        self._tell, self._happened, self._tasks = agent.tell, agent.happened, tasks
        self._lives: dict[Life, Process] = {}
        self._store: Process | None = None
        self._stores = 0
        self._rest: asyncio.TimerHandle | None = None

    async def perform(self, command: Command) -> None:
        match command:
            case StartWorker():
                self._tasks.create_task(self._start(command))
            case KillWorker(rank, incarnation):
                if (process := self._lives.get((rank, incarnation))) is not None:
                    self._nursery.kill(process)
            case SignalWorker(rank, incarnation, signum):
                if (process := self._lives.get((rank, incarnation))) is not None:
                    # A stopped process cannot hear; it must be let go to be able to end.
                    self._nursery.send_signal(process, signum)
                    self._nursery.send_signal(process, signal.SIGCONT)
            case PrepareStandby():
                self._prepare_later()
            case RenewStore():
                # Forked workers put the attempt into their keys (`attempts.py`), and those of
                # another node may be using the store by now. Spawned ones cannot be taught that.
                if self._plan.spawn:
                    await self.serve_store()
            case SendToManager(body):
                await self._tell(body)
            case SendHello(workers, attempt, remaining, condemned):
                served = self._addresses.store if self._ground.serves else ""
                node, host = NodeRank(self._plan.node), socket.gethostname()
                state = workers, served, attempt, remaining
                more = self._addresses.door, self._nursery.warm, condemned
                await self._tell(m.AgentHello(node, host, *state, *more))

    def _prepare_later(self) -> None:
        self.close()
        self._rest = asyncio.get_running_loop().call_later(
            REST_S, lambda: self._tasks.create_task(self._prepare())
        )

    async def _prepare(self) -> None:
        sibling = max((process.pid for process in self._lives.values()), default=0)
        await self._nursery.prepare(sibling)

    def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()

    async def serve_store(self) -> None:
        """A store that knows nothing, on the port that everybody knows."""
        listener = self._ground.listener
        if listener is None:
            return
        if self._store is not None:
            self._nursery.kill(self._store)
        host, _, port = self._addresses.store.rpartition(":")
        renewed, self._stores = self._stores > 0, self._stores + 1
        self._store = await self._nursery.serve_store(
            host, int(port), listener.fileno(), renewed, self._store_died
        )

    def _store_died(self, death: Death) -> None:
        if self._store == death.process:
            log.error("the store has died (signal %s); a new one takes its place", death.signal)
            self._store = None
            self._tasks.create_task(self.serve_store())

    async def _start(self, start: StartWorker) -> None:
        life = start.rank, start.incarnation
        files = self._logs.files(*life)
        env = of_worker(self._plan, start, self._addresses)
        env |= {
            "TORCHELASTIC_ERROR_FILE": str(files.error),
            "TASKD_STACK_FILE": str(files.stacks),
            "TASKD_BEACON": self._watch.beacon(life),
            "TASKD_PROFILING_PROBE": self._watch.probes.prepare(life),
        }
        ends = self._logs.open(start, self._output)
        try:
            process = await self._nursery.start(
                f"rank{start.rank}", env, ends[0], ends[1], lambda death: self._died(start, death)
            )
        except (StartRefused, ZygoteLost) as error:
            self._output.close(life, 0)
            self._happened(WorkerStartFailed(*life, str(error)))
            return
        finally:
            for end in ends:
                os.close(end)
        self._lives[life] = process
        ask = functools.partial(self._nursery.send_signal, process, STACK_SIGNAL)
        self._watch.add(
            life, process.pid, files.stacks, ask if not self._plan.spawn else _no_stacks
        )
        self._happened(WorkerStarted(*life, process.pid))

    def _died(self, start: StartWorker, death: Death) -> None:
        self._tasks.create_task(self._report(start, death))

    async def _report(self, start: StartWorker, death: Death) -> None:
        life = start.rank, start.incarnation
        tail = await asyncio.to_thread(self._output.close, life, DRAIN_S)
        self._lives.pop(life, None)
        self._watch.remove(life)
        failed = death.exit_code != 0
        evidence = self._logs.evidence(start, tail) if failed else ""
        pid = death.process.pid
        self._happened(m.WorkerExited(*life, pid, death.exit_code, death.signal, evidence))
