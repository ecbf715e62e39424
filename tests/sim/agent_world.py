"""Simulation of one node in virtual time: the manager repeats and delays orders, processes die.

The world knows which processes really run, separately from the state of the machine, and fails the
test as soon as a command contradicts that.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from taskd.core.agent.machine import Done, Node, State, Training, Waiting, WorkersConfig, step
from taskd.model import messages as m
from taskd.model.agent import (
    Command,
    Event,
    Interrupted,
    KillWorker,
    ManagerConnected,
    PrepareStandby,
    RenewStore,
    SendHello,
    SendToManager,
    SignalWorker,
    Starting,
    StartWorker,
    WorkerStarted,
    WorkerStartFailed,
)
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank
from taskd.model.types import Tick

MAX_STEPS = 20_000
Process = tuple[Rank, Incarnation]


class World:
    def __init__(self, seed: int, size: int = 4) -> None:
        self.random = random.Random(seed)
        self.config = WorkersConfig()
        self.ranks = tuple(Rank(n) for n in range(size))
        self.state: State = Waiting(Node(NodeRank(0), self.ranks, 5), 900.0)
        self.now = 0.0
        self.trace: list[str] = []
        self.edges: set[tuple[type[State], type[State]]] = set()
        self.running: dict[Process, int] = {}
        self.ever: set[Process] = set()
        self.stores = 0
        self.deaf = self.random.random() < 0.2
        """The manager never replies."""
        self._attempt = 0
        self._incident = 0
        self._finished: set[Rank] = set()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = count()
        self._pids = count(1000)

    def run(self) -> None:
        self._later(1.0, lambda: self._send(ManagerConnected()))
        for _ in range(self.random.randint(0, 6)):
            self._later(400.0, self._disturb)
        for _ in range(MAX_STEPS):
            if isinstance(self.state, Done):
                return
            if self._agenda and self._agenda[0][0] <= self.state.deadline:
                self.now, _, happen = heapq.heappop(self._agenda)
                happen()
            elif self.state.deadline < float("inf"):
                self.now = max(self.now, self.state.deadline)
                self._send(Tick())
            else:
                self._manager_ends()
        raise AssertionError("\n".join(["no end", *self.trace[-60:]]))

    # The truth: processes

    def _disturb(self) -> None:
        match self.random.choice(["die", "die", "die", "link", "interrupt", "foreign"]):
            case "die" if self.running:
                self._die(self.random.choice(sorted(self.running)), None)
            case "link":
                self._send(ManagerConnected())
            case "interrupt" if self.random.random() < 0.3:
                self._send(Interrupted("interrupted", 2))
            case "foreign":
                ranks = tuple(self.random.sample(self.ranks, 2))
                kinds: list[Event] = [
                    m.RestartWorkers(ranks),
                    m.StopWorkers(ranks),
                    m.RestartAgent(self.random.choice([3, 3, 3, -1])),
                    m.StartWorkers(5),
                ]
                self._order(self.random.choice(kinds))
            case _:
                pass

    def _die(self, process: Process, code: int | None) -> None:
        pid = self.running.pop(process, None)
        if pid is not None:
            # Some processes abort in the shutdown of their interpreter.
            ended = code == 0 and self.random.random() < 0.3
            code = None if ended else code
            signum = 9 if code is None else None
            gone = m.WorkerExited(*process, pid, code, signum, "", script_ended=ended)
            self._later(0.1, lambda: self._send(gone))

    def _started(self, start: StartWorker) -> None:
        process = start.rank, start.incarnation
        if self.random.random() < 0.05:
            self._send(WorkerStartFailed(*process, "no memory"))
            return
        same = [rank for rank, _ in self.running if rank == start.rank]
        self._check(not same, f"rank {start.rank} runs twice")
        pid = next(self._pids)
        self.running[process] = pid
        self._later(0.01, lambda: self._send(WorkerStarted(*process, pid)))
        if self.random.random() < 0.4:
            self._later(600.0, lambda: self._die(process, 0))

    def _perform(self, command: Command) -> None:
        match command:
            case StartWorker(rank, incarnation):
                self._check(
                    (rank, incarnation) not in self.ever, "an incarnation was started twice"
                )
                self.ever.add((rank, incarnation))
                self._later(0.05, lambda: self._started(command))
            case KillWorker(rank, incarnation):
                self._later(0.01, lambda: self._die((rank, incarnation), None))
            case SignalWorker(rank, incarnation):
                if self.random.random() < 0.7:
                    self._later(20.0, lambda: self._die((rank, incarnation), None))
            case PrepareStandby():
                assert isinstance(self.state, Training)
                there = not any(isinstance(w, Starting) for w in self.state.workers.values())
                self._check(there, "a standby was prepared before all ranks run")
            case RenewStore():
                self._check(not self.running, "a new store while old processes run")
                self.stores += 1
            case SendHello():
                pass
            case SendToManager(body):
                if not self.deaf:
                    self._later(0.5, lambda: self._manager_receives(body))

    # The manager: it repeats its orders, and later ones may arrive first

    def _order(self, order: Event) -> None:
        for _ in range(1 + (self.random.random() < 0.3)):
            self._later(self.random.choice([0.1, 0.1, 30.0]), lambda: self._send(order))

    def _manager_receives(self, body: m.Body) -> None:
        match body:
            case m.RestartsLeft(remaining):
                self._order(m.StartWorkers(remaining))
            case m.WorkerExited(rank) if body.finished:
                self._finished.add(rank)
                if self._finished == set(self.ranks):
                    self._order(m.EndJob(0, "all done"))
            case m.WorkerExited(rank, incarnation):
                self._incident += 1
                if self.random.random() < 0.5:
                    process = Incarnation(incarnation + 1)
                    member = m.Member(rank, NodeRank(0), process)
                    self._order(m.ReplaceWorkers(Incident(self._incident), (member,)))
                else:
                    self._attempt += 1
                    self._finished.clear()
                    self._order(m.RestartJob(Incident(self._incident), self._attempt, ()))
            case _:
                pass

    def _manager_ends(self) -> None:
        """Nothing is on its way any more: a manager would look at the silence and end the job."""
        self._send(m.EndJob(1, "enough"))

    def _send(self, event: Event) -> None:
        outcome = step(self.state, event, self.now, self.config)
        name = type(outcome.state).__name__
        self.trace.append(f"{self.now:8.2f} {event} -> {name}: {outcome.because}")
        self._check(bool(outcome.because), "a decision without a reason")
        if outcome.state != self.state:
            self.edges.add((type(self.state), type(outcome.state)))
        self.state = outcome.state
        if isinstance(self.state, Training):
            self._check(set(self.state.workers) == set(self.ranks), "a rank was forgotten")
        for command in outcome.commands:
            self._perform(command)

    def _later(self, within_s: float, happen: Callable[[], None]) -> None:
        at = self.now + self.random.uniform(0, within_s)
        heapq.heappush(self._agenda, (at, next(self._tiebreak), happen))

    def _check(self, holds: bool, what: str) -> None:
        assert holds, "\n".join([what, *self.trace[-60:]])
