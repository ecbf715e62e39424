"""The agent's actions where a framework owns the processes and gives us functions to call.

MindSpore's `msrun` and the documented `register_func` give four of them: kill, start all, start
some, and monitor. Commands arrive one rank at a time and are carried out together, because the
functions take several ranks. Exits are noticed through pidfds where the framework gives the pid;
the documented look once per second only has to find what pidfds cannot show.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from taskd.agent.main import Agent
from taskd.errors import SettingsError
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

log = logging.getLogger(__name__)

LOOK_S = 1.0
NOT_STARTED, VANISHED = 200, 300
"""Statuses of a rank that was never started, and of one that has disappeared."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What the framework says about one rank."""

    pid: int | None
    status: int | None
    """None: it runs. Otherwise its exit code, minus its signal, or one of the two above."""

    @property
    def runs(self) -> bool:
        return self.status is None and self.pid is not None


class Framework(Protocol):
    """The framework's functions, expressed in ranks."""

    def look(self) -> Mapping[Rank, RankStatus] | None:
        """The status of every rank. None: the framework's answer is invalid at the moment."""

    def settle_s(self, ranks: tuple[Rank, ...]) -> float:
        """How long to wait between the exit of these ranks and their next start."""

    def start(self, ranks: tuple[Rank, ...]) -> None: ...
    def kill(self, ranks: tuple[Rank, ...], pids: tuple[int, ...]) -> None: ...


Callbacks = dict[str, Callable[..., Any]]
"""The registered functions by their documented names."""


def require(callbacks: Callbacks, *names: str) -> None:
    """Raises SettingsError if some of these functions are not registered."""
    if missing := [name for name in names if name not in callbacks]:
        problems = [f"{name} is not registered: call register_func" for name in missing]
        raise SettingsError(problems)


class FrameworkActions:
    """Carries out the machine's commands by calling the framework's functions."""

    def __init__(
        self,
        node: NodeRank,
        framework: Framework,
        agent: Agent,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._node, self._framework, self._agent = node, framework, agent
        self._tasks = tasks
        self._starting: dict[Rank, Incarnation] = {}
        self._killing: set[Rank] = set()
        self._incarnations: dict[Rank, Incarnation] = {}
        self._pids: dict[Rank, int] = {}
        self._pidfds: dict[Rank, int] = {}
        self._waiting: dict[Rank, Incarnation] = {}
        """Incarnations whose start is delayed; the framework still shows an older incarnation."""
        self._started_once: set[Rank] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._scheduled = False
        self._look_task = tasks.create_task(self._look_regularly())

    async def perform(self, command: Command) -> None:
        match command:
            case StartWorker(rank, incarnation):
                self._starting[rank] = incarnation
                self._schedule()
            case KillWorker(rank, incarnation) | SignalWorker(rank, incarnation):
                self._kill(rank, incarnation)
            case RenewStore() | PrepareStandby():
                pass  # the framework does this itself, or has no use for it
            case SendToManager(body):
                await self._agent.send_to_manager(body)
            case SendHello(workers, attempt, remaining, condemned, shards):
                host = socket.gethostname()
                state = workers, "", attempt, remaining
                hello = m.AgentHello(self._node, host, *state, condemned=condemned, shards=shards)
                await self._agent.send_to_manager(hello)

    def close(self) -> None:
        self._look_task.cancel()
        for timer in self._timers:
            timer.cancel()
        for rank in list(self._pidfds):
            self._unwatch(rank)

    def _kill(self, rank: Rank, incarnation: Incarnation) -> None:
        if self._incarnations.get(rank) == incarnation:
            self._killing.add(rank)
            self._schedule()
        elif self._waiting.get(rank) == incarnation:
            del self._waiting[rank]
            self._agent.enqueue(
                WorkerStartFailed(rank, incarnation, "it was stopped before it had started")
            )

    def _schedule(self) -> None:
        """Act in the loop's next iteration, when all commands of one decision have arrived."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        self._scheduled = False
        if self._killing:
            ranks = tuple(sorted(self._killing))
            self._killing.clear()
            self._framework.kill(ranks, tuple(self._pids[r] for r in ranks if r in self._pids))
        if self._starting:
            starting, self._starting = self._starting, {}
            self._waiting |= starting
            ranks = tuple(sorted(starting))
            wait_s = (
                self._framework.settle_s(ranks) if self._started_once & starting.keys() else 0.0
            )
            self._started_once |= starting.keys()
            self._timers = [timer for timer in self._timers if not timer.cancelled()]
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(wait_s, self._start, starting))

    def _start(self, starting: Mapping[Rank, Incarnation]) -> None:
        wanted = {
            rank: incarnation
            for rank, incarnation in starting.items()
            if self._waiting.get(rank) == incarnation
        }
        if not wanted:
            return
        for rank, incarnation in wanted.items():
            self._incarnations[rank] = incarnation
            del self._waiting[rank]
        self._framework.start(tuple(sorted(wanted)))
        self._look()
        for rank, incarnation in wanted.items():
            if rank not in self._pids and self._incarnations.get(rank) == incarnation:
                del self._incarnations[rank]
                self._agent.enqueue(
                    WorkerStartFailed(rank, incarnation, "the framework shows no process for it")
                )

    async def _look_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._agent.send_to_manager(m.KeptAlive())
            self._look()

    def _look(self) -> None:
        # Read the exit statuses before we ask the framework: MindSpore reaps its children first,
        # and afterwards only knows that they are gone.
        ends = {rank: _exit_status(pidfd) for rank, pidfd in self._pidfds.items()}
        seen = self._framework.look()
        for rank, shown in (seen or {}).items():
            incarnation = self._incarnations.get(rank)
            if incarnation is None:
                continue
            if shown.runs and shown.pid is not None and self._pids.get(rank) != shown.pid:
                self._watch(rank, shown.pid)
                self._agent.enqueue(WorkerStarted(rank, incarnation, shown.pid))
            elif shown.status is not None and shown.status != NOT_STARTED:
                known = ends.get(rank) if shown.status == VANISHED else shown.status
                self._exited(rank, incarnation, RankStatus(shown.pid, known))

    def _exited(self, rank: Rank, incarnation: Incarnation, last: RankStatus) -> None:
        self._unwatch(rank)
        del self._incarnations[rank]
        pid = self._pids.pop(rank, last.pid or 0)
        status = last.status
        code, signum = (None, -status) if status is not None and status < 0 else (status, None)
        self._agent.enqueue(m.WorkerExited(rank, incarnation, pid, code, signum, ""))

    def _watch(self, rank: Rank, pid: int) -> None:
        self._unwatch(rank)
        self._pids[rank] = pid
        with suppress(ProcessLookupError):
            self._pidfds[rank] = os.pidfd_open(pid)
            loop = asyncio.get_running_loop()
            loop.add_reader(self._pidfds[rank], self._gone, rank, pid)

    def _unwatch(self, rank: Rank) -> None:
        pidfd = self._pidfds.pop(rank, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def _gone(self, rank: Rank, pid: int) -> None:
        status = _exit_status(self._pidfds[rank])  # before the framework reaps it
        self._look()  # the framework may know more; if it does not, the process is dead anyway
        incarnation = self._incarnations.get(rank)
        if incarnation is not None and self._pids.get(rank) == pid:
            self._exited(rank, incarnation, RankStatus(pid, status))


def _exit_status(pidfd: int) -> int | None:
    """A child's exit code, or its signal as a negative number, without reaping it.

    None: it still runs, it is not our child, or it has already been reaped.
    """
    try:
        status = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
