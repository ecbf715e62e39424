"""An agent's hands where a framework owns the processes and lends us functions to call.

MindSpore's `msrun` and the documented `register_func` give four of them: kill, start all, start
some, and look. Commands come one rank at a time and are carried out together, as the functions
want them. Deaths are seen through pidfds where the framework tells the pid; looking every second,
as documented, only has to find what pidfds cannot show.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from taskd.agent.main import Agent
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
"""What a framework says of a rank that it has not started, and of one that is gone somehow."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What the framework says of one rank."""

    pid: int | None
    status: int | None
    """None: it runs. Otherwise how it ended, or that it was never started."""

    @property
    def runs(self) -> bool:
        return self.status is None and self.pid is not None


class Framework(Protocol):
    """The framework's functions, with ranks instead of whatever it uses itself."""

    def look(self) -> Mapping[Rank, Sight] | None:
        """None: what it says makes no sense now."""

    def settle_s(self, ranks: tuple[Rank, ...]) -> float:
        """How long it needs between the death of these ranks and their next start."""

    def start(self, ranks: tuple[Rank, ...]) -> None: ...
    def kill(self, ranks: tuple[Rank, ...], pids: tuple[int, ...]) -> None: ...


class CalledHands:
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
        self._lives: dict[Rank, Incarnation] = {}
        self._pids: dict[Rank, int] = {}
        self._pidfds: dict[Rank, int] = {}
        self._waiting: dict[Rank, Incarnation] = {}
        """Lives whose start must wait; what the framework shows of these ranks is older."""
        self._ever: set[Rank] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._due = False
        self._looking = tasks.create_task(self._look_now_and_then())

    async def perform(self, command: Command) -> None:
        match command:
            case StartWorker(rank, incarnation):
                self._starting[rank] = incarnation
                self._soon()
            case KillWorker(rank, incarnation) | SignalWorker(rank, incarnation):
                self._end(rank, incarnation)
            case RenewStore() | PrepareStandby():
                pass  # the framework's own affair
            case SendToManager(body):
                await self._agent.tell(body)
            case SendHello(workers, attempt, remaining, condemned):
                host = socket.gethostname()
                state = workers, "", attempt, remaining
                await self._agent.tell(m.AgentHello(self._node, host, *state, condemned=condemned))

    def close(self) -> None:
        self._looking.cancel()
        for timer in self._timers:
            timer.cancel()
        for rank in list(self._pidfds):
            self._unwatch(rank)

    def _end(self, rank: Rank, incarnation: Incarnation) -> None:
        if self._lives.get(rank) == incarnation:
            self._killing.add(rank)
            self._soon()
        elif self._waiting.get(rank) == incarnation:
            del self._waiting[rank]
            self._agent.happened(WorkerStartFailed(rank, incarnation, "it was not wanted any more"))

    def _soon(self) -> None:
        """All commands of one decision have come when the loop turns next."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._act)

    def _act(self) -> None:
        self._due = False
        if self._killing:
            ranks = tuple(sorted(self._killing))
            self._killing.clear()
            self._framework.kill(ranks, tuple(self._pids[r] for r in ranks if r in self._pids))
        if self._starting:
            lives, self._starting = self._starting, {}
            self._waiting |= lives
            ranks = tuple(sorted(lives))
            wait_s = self._framework.settle_s(ranks) if self._ever & lives.keys() else 0.0
            self._ever |= lives.keys()
            self._timers = [timer for timer in self._timers if not timer.cancelled()]
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(wait_s, self._start, lives))

    def _start(self, lives: Mapping[Rank, Incarnation]) -> None:
        wanted = {rank: life for rank, life in lives.items() if self._waiting.get(rank) == life}
        if not wanted:
            return
        for rank, life in wanted.items():
            self._lives[rank] = life
            del self._waiting[rank]
        self._framework.start(tuple(sorted(wanted)))
        self._look()
        for rank, life in wanted.items():
            if rank not in self._pids and self._lives.get(rank) == life:
                del self._lives[rank]
                self._agent.happened(WorkerStartFailed(rank, life, "it did not come up"))

    async def _look_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._agent.tell(m.KeptAlive())
            self._look()

    def _look(self) -> None:
        # A framework that waits for its children first and asks for their pids then, as MindSpore
        # does, only knows that they are gone.
        ends = {rank: _how_it_ended(pidfd) for rank, pidfd in self._pidfds.items()}
        seen = self._framework.look()
        for rank, sight in (seen or {}).items():
            life = self._lives.get(rank)
            if life is None:
                continue
            if sight.runs and sight.pid is not None and self._pids.get(rank) != sight.pid:
                self._watch(rank, sight.pid)
                self._agent.happened(WorkerStarted(rank, life, sight.pid))
            elif sight.status is not None and sight.status != NOT_STARTED:
                known = ends.get(rank) if sight.status == VANISHED else sight.status
                self._ended(rank, life, Sight(sight.pid, known))

    def _ended(self, rank: Rank, life: Incarnation, sight: Sight) -> None:
        self._unwatch(rank)
        del self._lives[rank]
        pid = self._pids.pop(rank, sight.pid or 0)
        status = sight.status
        code, signum = (None, -status) if status is not None and status < 0 else (status, None)
        self._agent.happened(m.WorkerExited(rank, life, pid, code, signum, ""))

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
        how = _how_it_ended(self._pidfds[rank])  # as long as nobody has waited for it
        self._look()  # the framework may know it, too; if nobody does, it is dead all the same
        life = self._lives.get(rank)
        if life is not None and self._pids.get(rank) == pid:
            self._ended(rank, life, Sight(pid, how))


def _how_it_ended(pidfd: int) -> int | None:
    """A child's exit code, or its signal as a negative number. It is left for others to wait for.

    None: it runs, or it is no child of ours, or somebody has waited for it already.
    """
    try:
        told = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if told is None:
        return None
    return told.si_status if told.si_code == os.CLD_EXITED else -told.si_status
