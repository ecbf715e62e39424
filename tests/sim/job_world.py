"""A whole job in one thread and virtual time: real machines of clusterd, manager, agents, ranks.

Ranks, agents, the manager and connections fail and hang at random; messages are late and keep only
the order of their source. The world knows which processes run, what they hold and which group they
are in, separately from the machines' states, and fails the test on a contradiction.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from math import inf

from taskd.core.agent import machine as agents
from taskd.core.clusterd import machine as clusterd
from taskd.core.clusterd.job_config import RecoveryConfig
from taskd.core.manager import machine as manager
from taskd.core.manager.states import UNLIMITED_RESTARTS, Ended, Ending, JobConfig
from taskd.core.manager.states import State as ManagerState
from taskd.model import agent as local
from taskd.model import clusterd as cd
from taskd.model import messages as m
from taskd.model.clusterd import FaultReport, ResultReport, StopReport, StrategiesReport
from taskd.model.faults import Fault
from taskd.model.ids import (
    ALL,
    Incarnation,
    Incident,
    JobId,
    NodeRank,
    Position,
    Rank,
    Role,
    agent,
    worker,
)
from taskd.model.manager import (
    Command,
    Event,
    Finish,
    MessageReceived,
    NodeBack,
    NodeConnected,
    NodeDisconnected,
    NodeGone,
    NodeSilent,
    NodesRegistered,
    RankHung,
    SendMessage,
    SignalReceived,
    StopRequested,
    Subscribed,
)
from taskd.model.operations import NicResult
from taskd.model.strategies import Strategy, parse_strategies
from taskd.model.types import Tick
from taskd.model.worker import Identity
from tests.sim.job_workers import Process

MAX_EVENTS = 200_000
SILENCE_S = 3.0
BLIP_SEEN_S = 0.9
HANG_SEEN_S = 5.0
OUTAGE_S = 400.0
TROUBLE = (
    *("kill", "kill", "kill", "kill", "error", "hang", "hang", "cut", "cut", "node", "node"),
    *("manager", "manager", "stream", "outage", "relink", "blip", "operation", "fault", "end"),
)


@dataclass
class Group:
    """A process group: its collectives complete when all members have entered."""

    members: tuple[Process, ...]
    incident: Incident
    here: dict[int, list[Process]] = field(default_factory=dict)

    def broken(self) -> bool:
        return any(not one.alive or one.machine.incident > self.incident for one in self.members)


class World:
    def __init__(
        self, seed: int, *, friendly: bool = False, only: str = "", etcd: bool = False
    ) -> None:
        """`friendly`: all strategies are allowed, and the script is protected. `only`: this one
        strategy is allowed, and there are several nodes. `etcd`: each manager is the leader of a
        new term, and knows which nodes the job has."""
        self.random = random.Random(seed)
        self.etcd = etcd
        friendly = friendly or bool(only)
        shapes = [(1, 3), (2, 2), (3, 1)]
        self.nodes, self.per_node = self.random.choice(shapes[1:] if only else shapes)
        self.spares = self.random.choice([0, 0, 1]) if self.nodes > 1 else 0
        self.steps = self.random.randint(5, 30)
        self.protected = friendly or self.random.random() < 0.8
        """False: a script that does not use taskd. Its ranks send nothing."""
        self.exit_seen_s = 0.05
        """How long it may take until an agent sees that a process has ended."""
        self.size = self.nodes * self.per_node
        words = {s.value for s in Strategy if friendly or self.random.random() < 0.7}
        words = {only} if only else words
        strategies = parse_strategies(",".join(sorted(words)))
        self.config = JobConfig(
            nodes=self.nodes,
            ranks_per_node=self.per_node,
            max_restarts=self.random.choice([UNLIMITED_RESTARTS, 0, 1, 3]),
            rescheduling=self.random.random() < 0.5,
            fruitless_limit=self.random.choice([3, 8]),
        )
        if etcd:
            self.config = replace(
                self.config,
                rescheduling=True,
                fruitless_limit=5,
                max_restarts=UNLIMITED_RESTARTS,
            )
        self.now = 0.0
        self.record: list[str] = []
        self.edges: set[tuple[type[ManagerState], type[ManagerState]]] = set()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tiebreak = count()
        self._line_free: dict[object, float] = {}
        self._cut_until: dict[int, float] = {}
        """Nodes that no packet reaches or leaves before this time."""
        self._pids = count(1000)
        # clusterd
        self.clusterd: clusterd.State = clusterd.NEW
        job = cd.JobConfig(strategies=strategies)
        self._decide(cd.JobRegistered(JobId("job"), job, "a seed"))
        self._decide(cd.Subscribed(cd.Stream.NIC))
        pods = tuple(
            cd.Pod(NodeRank(n), f"pod{n}", ranks=tuple(map(Rank, self._ranks_of(n))))
            for n in range(self.nodes)
        )
        self._decide(cd.PodsSeen(pods))
        # manager
        self.manager: ManagerState | None = None
        self.manager_incarnation = 0
        self.exit_code: int | None = None
        self._held: list[MessageReceived] = []
        # agents and ranks
        everywhere = range(self.nodes + self.spares)
        self.agents: dict[int, agents.State | None] = dict.fromkeys(everywhere)
        self._cold: set[int] = set()
        """Agents that cannot start a rank at once."""
        self.procs: dict[tuple[int, int], Process] = {}
        self.begun: set[int] = set()
        self.finished: set[int] = set()
        self.committed_by: dict[int, int] = {}
        self.meetings: dict[Incident, dict[Process, m.Repair]] = {}
        self.start_manager()
        for node in everywhere:
            self.start_agent(node)

    def _ranks_of(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)

    # Time

    def run(self, until: float) -> None:
        for _ in range(MAX_EVENTS):
            if self.exit_code is not None or not self._agenda:
                return
            at, _, happen = heapq.heappop(self._agenda)
            if at > until:
                return
            self.now = max(self.now, at)
            happen()
        raise AssertionError(self._tale("no end"))

    def later(self, within_s: float, happen: Callable[[], None]) -> None:
        self.at(self.now + self.random.uniform(0.0, within_s), happen)

    def at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._tiebreak), happen))

    def in_order(self, line: object, happen: Callable[[], None], node: int = -1) -> None:
        """Deliver late, but never before an earlier message of the same source."""
        slow = 2.0 if self.random.random() < 0.02 else 0.02
        arrives = max(self.now, self._cut_until.get(node, 0.0)) + self.random.uniform(0, slow)
        when = max(arrives, self._line_free.get(line, 0.0))
        self._line_free[line] = when
        self.at(when, happen)

    def note(self, line: str) -> None:
        self.record.append(f"{self.now:9.3f} {line}")

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise AssertionError(self._tale(what))

    def _tale(self, what: str) -> str:
        return "\n".join([what, *self.record[-400:]])

    # clusterd

    def _decide(self, event: cd.Event) -> None:
        outcome = clusterd.step(self.clusterd, event, self.now, RecoveryConfig())
        self.clusterd = outcome.state
        self.note(f"clusterd {_name(event)} -> {_name(outcome.state)}: {outcome.because}")
        for command in outcome.commands:
            if isinstance(command, cd.SendSwitchRanks):
                self.later(5.0, partial(self._decide, NicResult(self.random.random() < 0.8)))
            if isinstance(command, cd.Signal) and self.clusterd.job.subscribed:
                incarnation = self.manager_incarnation
                self.in_order(("signals", incarnation), partial(self._signal, incarnation, command))
        deadline = self.clusterd.deadline
        if deadline < inf:
            self.at(deadline, partial(self._clusterd_tick, deadline))

    def _clusterd_tick(self, deadline: float) -> None:
        if self.clusterd.deadline == deadline:
            self._decide(Tick())

    def _signal(self, incarnation: int, signal: cd.Signal) -> None:
        if incarnation != self.manager_incarnation or self.manager is None:
            self._decide(cd.SignalFailed(signal.sequence))
            return
        self._decide(cd.SignalDelivered(signal.sequence))
        self.step_manager(SignalReceived(signal))

    def break_stream(self, within_s: float) -> None:
        """The manager's connection to clusterd breaks and is opened again."""
        self._decide(cd.Unsubscribed())
        incarnation = self.manager_incarnation
        self.later(within_s, lambda: self._subscribe(incarnation))

    def _subscribe(self, incarnation: int) -> None:
        if incarnation == self.manager_incarnation and self.manager is not None:
            self._decide(cd.Subscribed())
            self.step_manager(Subscribed())

    # The manager

    def start_manager(self) -> None:
        if self.exit_code is not None:
            return
        self.manager = manager.begin(self.config, self.now)
        self.manager_incarnation += 1
        self._manager_deadline()
        if self.etcd:
            nodes = frozenset(map(NodeRank, self.agents))
            self.step_manager(NodesRegistered(nodes, self.manager_incarnation))
        held, self._held = self._held, []
        for heard in held:
            if self.random.random() < 0.9:
                self.step_manager(heard)
        for node, state in self.agents.items():
            if state is not None:
                self.later(1.0, partial(self._connect, node, self.manager_incarnation))
        self.later(1.0, partial(self._subscribe, self.manager_incarnation))
        if self.etcd:
            for node in self.agents:
                self.later(0.5, partial(self._look_for, node, self.manager_incarnation))

    def _look_for(self, node: int, incarnation: int) -> None:
        """A new leader probes the nodes that the job has."""
        if incarnation != self.manager_incarnation or self.manager is None:
            return
        if self.agents[node] is None:
            self.step_manager(NodeGone(NodeRank(node), "its liveness port is closed"))
        elif self._cut_until.get(node, 0.0) > self.now:
            self._unheard(node, incarnation)

    def kill_manager(self) -> None:
        if self.manager is None or isinstance(self.manager, Ending | Ended):
            return
        self.note("the manager is killed")
        self.manager = None
        self._decide(cd.Unsubscribed())
        self.later(5.0, self.start_manager)

    def _connect(self, node: int, incarnation: int) -> None:
        if incarnation == self.manager_incarnation and self.agents[node] is not None:
            self.step_manager(NodeConnected(NodeRank(node)))
            self.step_agent(node, local.ManagerConnected())

    def step_manager(self, event: Event) -> None:
        if self.manager is None:
            if isinstance(event, MessageReceived):
                self._held.append(event)
            return
        before = self.manager
        outcome = manager.step(before, event, self.now, self.config)
        what = _name(event.body) if isinstance(event, MessageReceived) else _name(event)
        self.note(f"manager {what} -> {_name(outcome.state)}: {outcome.because}")
        if type(outcome.state) is not type(before):
            self.edges.add((type(before), type(outcome.state)))
        self.manager = outcome.state
        for command in outcome.commands:
            self._perform(command)
        self._manager_deadline()

    def _manager_deadline(self) -> None:
        assert self.manager is not None
        deadline, incarnation = self.manager.deadline, self.manager_incarnation
        if deadline < inf:
            self.at(deadline, partial(self._manager_tick, deadline, incarnation))

    def _manager_tick(self, deadline: float, incarnation: int) -> None:
        state = self.manager
        if (
            state is not None
            and incarnation == self.manager_incarnation
            and state.deadline == deadline
        ):
            self.step_manager(Tick())

    def _perform(self, command: Command) -> None:
        match command:
            case SendMessage(to, body):
                self._send_down(to, body)
            case FaultReport(faults):
                travelling = tuple(Fault(f.rank, f.kind, evidence=f.cause) for f in faults)
                self._report(FaultReport(travelling))
            case StopReport() | StrategiesReport() | ResultReport():
                self._report(command)
            case Finish(exit_code, _):
                assert isinstance(self.manager, Ended)
                self.exit_code = exit_code

    def _report(self, event: cd.Event) -> None:
        self.in_order(("reports", self.manager_incarnation), partial(self._decide, event))

    def _send_down(self, to: Position, body: m.Body) -> None:
        incarnation = self.manager_incarnation
        if to.role == Role.AGENT:
            node = int(to.server_rank)
            take = partial(self.step_agent, node, body)
            self.in_order(("to agent", node, incarnation), take, node)
            return
        for proc in list(self.procs.values()):
            if to.server_rank in (ALL, str(proc.node)) and to.process_rank in (ALL, str(proc.rank)):
                take = partial(self._to_rank, proc, body)
                self.in_order(("to rank", proc, incarnation), take, proc.node)

    def _to_rank(self, proc: Process, body: m.Body) -> None:
        """The current process of the rank gets it: an address names a rank, not an incarnation."""
        now = next(
            (p for p in self.procs.values() if (p.node, p.rank) == (proc.node, proc.rank)), None
        )
        if now is not None:
            now.heard(body)

    def to_manager(self, node: int, source: str, body: m.Body) -> None:
        src = agent(node) if source.startswith("agent") else worker(node, _rank_in(source))
        self.in_order(("up", source), partial(self.step_manager, MessageReceived(src, body)), node)

    # Agents

    def start_agent(self, node: int) -> None:
        if self.agents[node] is not None or self.exit_code is not None:
            return
        ranks = tuple(map(Rank, self._ranks_of(node))) if node < self.nodes else ()
        budget = self.config.max_restarts
        self.agents[node] = agents.Waiting(
            agents.Node(NodeRank(node), ranks, budget), self.now + 900.0
        )
        self.note(f"agent {node} starts")
        self.later(1.0, partial(self._connect, node, self.manager_incarnation))
        self._cold.add(node)
        self.later(5.0, partial(self._warm, node))

    def _warm(self, node: int) -> None:
        self._cold.discard(node)
        self.step_agent(node, local.WarmedUp())

    def kill_agent(self, node: int) -> None:
        """The node is lost with everything on it; it may come back."""
        if self.agents[node] is None:
            return
        self.note(f"node {node} is lost")
        if node == 0:
            self.begun.clear()  # the store was on this node
        self.agents[node] = None
        for proc in list(self.procs.values()):
            if proc.node == node:
                self._bury(proc)
        self._unlink(node)
        if self.random.random() < 0.7:
            self.later(20.0, partial(self.start_agent, node))

    def lose_node(self, node: int, back_s: float) -> None:
        """The node is lost and comes back for certain."""
        self.kill_agent(node)
        self.later(back_s, partial(self.start_agent, node))

    def blip(self, node: int, for_s: float) -> None:
        """No packet passes between the node and the manager for a moment; no connection breaks."""
        if self.agents[node] is None:
            return
        self.note(f"node {node} is cut off for {for_s:.2f} s")
        self._cut_until[node] = self.now + for_s
        incarnation = self.manager_incarnation
        if for_s > BLIP_SEEN_S:
            self.at(self.now + BLIP_SEEN_S, partial(self._unheard, node, incarnation))
        for proc in self._living():
            if proc.node == node and isinstance(proc.group, Group) and self.random.random() < 0.5:
                self.later(2 * for_s, partial(proc.fail, proc.group, "a connection was cut"))

    def _unheard(self, node: int, incarnation: int) -> None:
        if self.agents[node] is not None and incarnation == self.manager_incarnation:
            self.step_manager(NodeSilent(NodeRank(node), "no heartbeat for 0.9 s"))
            self.at(self._cut_until[node] + 0.1, partial(self._heard_again, node, incarnation))

    def _heard_again(self, node: int, incarnation: int) -> None:
        if self.agents[node] is not None and incarnation == self.manager_incarnation:
            self.step_manager(NodeBack(NodeRank(node)))

    def check_no_rank_runs_twice(self) -> None:
        ranks = [proc.rank for proc in self.procs.values()]
        self.check(len(set(ranks)) == len(ranks), f"a former incarnation lives on: {ranks}")

    def _unlink(self, node: int) -> None:
        self.step_manager(NodeDisconnected(NodeRank(node)))
        incarnation = self.manager_incarnation
        self.at(self.now + SILENCE_S, partial(self._silent, node, incarnation))
        if self.random.random() < 0.5:
            self.later(0.02, partial(self._probed, node, incarnation))

    def _probed(self, node: int, incarnation: int) -> None:
        if self.agents[node] is None and incarnation == self.manager_incarnation:
            self.step_manager(NodeGone(NodeRank(node), "its liveness port is closed"))

    def _silent(self, node: int, incarnation: int) -> None:
        if self.agents[node] is None and incarnation == self.manager_incarnation:
            self.step_manager(NodeSilent(NodeRank(node), "disconnected for 3 s"))

    def step_agent(self, node: int, event: object) -> None:
        state = self.agents[node]
        known = (
            local.WorkerStarted
            | local.WorkerStartFailed
            | local.ManagerConnected
            | local.WarmedUp
            | Tick
        )
        if state is None or not isinstance(event, known | m.WorkerExited | local.Order):
            return
        outcome = agents.step(state, event, self.now, agents.WorkersConfig())
        self.note(f"agent {node} {_name(event)} -> {_name(outcome.state)}: {outcome.because}")
        self.agents[node] = outcome.state
        for command in outcome.commands:
            self._agent_does(node, command)
        if isinstance(outcome.state, agents.Done):
            self._agent_leaves(node)
        elif outcome.state.deadline < inf:
            self.at(outcome.state.deadline, partial(self._agent_tick, node, outcome.state))

    def _agent_tick(self, node: int, state: agents.State) -> None:
        if self.agents[node] is state:
            self.step_agent(node, Tick())

    def _agent_leaves(self, node: int) -> None:
        self.agents[node] = None
        alive = [proc for proc in self.procs.values() if proc.node == node]
        self.check(not alive, f"agent {node} left its ranks behind")
        self._unlink(node)
        if self.config.rescheduling:
            self.later(20.0, partial(self.start_agent, node))

    def _agent_does(self, node: int, command: local.Command) -> None:
        match command:
            case local.StartWorker(rank, incarnation, attempt, incident):
                born = partial(self._born, node, rank, incarnation, attempt, incident)
                self.later(0.1, born)
            case local.KillWorker(rank, incarnation) | local.SignalWorker(rank, incarnation):
                proc = self.procs.get((rank, incarnation))
                if proc is not None:
                    self.later(0.01, partial(self.exits, proc, None, "killed"))
            case local.SendToManager(body):
                self.to_manager(node, f"agent {node}", body)
            case local.SendHello(workers, attempt, remaining, condemned, _):
                host, warm = f"host{node}", node not in self._cold
                state = workers, f"{host}:1", attempt, remaining
                hello = m.AgentHello(NodeRank(node), host, *state, condemned=condemned, warm=warm)
                self.to_manager(node, f"agent {node}", hello)
            case local.RenewStore() | local.PrepareStandby():
                pass

    def _born(
        self, node: int, rank: Rank, incarnation: Incarnation, attempt: int, incident: Incident
    ) -> None:
        if self.agents[node] is None:
            return
        same = [proc for proc in self.procs.values() if proc.rank == rank and proc.node == node]
        self.check(not same, f"rank {rank} runs twice on node {node}")
        pid = next(self._pids)
        me = Identity(rank, NodeRank(node), incarnation, pid)
        self.procs[rank, incarnation] = Process(self, me, attempt, incident)
        self.step_agent(node, local.WorkerStarted(rank, incarnation, pid))

    # Ranks: their real state

    def exits(
        self,
        proc: Process,
        code: int | None,
        because: str,
        error: m.ScriptError | None = None,
    ) -> None:
        if not proc.alive:
            return
        self.note(f"{proc} ends with {code}: {because}")
        if code == 0 and proc.held == self.steps:
            self.finished.add(proc.rank)
        # The messages of a finished rank arrive before its exit is noticed.
        self._bury(proc, is_missed=proc.held != self.steps)
        me = proc.me
        # Some processes abort in the shutdown of their interpreter, after the script has ended.
        ended = code == 0 and self.random.random() < 0.2
        code = None if ended else code
        signum = 9 if code is None else None
        gone = m.WorkerExited(
            me.rank, me.incarnation, me.pid, code, signum, because, script_ended=ended, error=error
        )
        self.later(self.exit_seen_s, lambda: self.step_agent(proc.node, gone))

    def _bury(self, proc: Process, is_missed: bool = True) -> None:
        proc.alive = False
        self.procs.pop((proc.rank, proc.me.incarnation), None)
        if not is_missed:
            return
        for other in list(self.procs.values()):
            group, plan = other.group, other.plan
            if isinstance(group, Group) and proc in group.members and self.random.random() < 0.7:
                self.later(0.3, partial(other.fail, group, f"{proc} is gone"))
            incarnation = proc.rank, proc.me.incarnation
            if plan is not None and any(
                (w.rank, w.incarnation) == incarnation for w in plan.members
            ):
                self.later(0.3, partial(other.cannot_meet, plan))

    def form_start(self, attempt: int) -> None:
        """The first groups of an attempt form when all its ranks have come."""
        waiting = [
            proc
            for proc in self.procs.values()
            if proc.attempt == attempt and proc.thread == "starting" and not proc.hung
        ]
        if len({proc.rank for proc in waiting}) == self.size:
            self.begun.add(attempt)
            group = Group(tuple(waiting), max(proc.machine.incident for proc in waiting))
            for proc in waiting:
                proc.start(group)

    def entered(self, proc: Process) -> None:
        group = proc.group
        assert isinstance(group, Group)
        assert proc.held is not None
        here = group.here.setdefault(proc.held, [])
        here.append(proc)
        if set(group.members) <= set(here):
            self.check(
                len({one.rank for one in here}) == len(here),
                "two incarnations of one rank in one world",
            )
            for one in here:
                self.later(0.1, partial(one.reduced, group, proc.held))
        elif group.broken() and self.random.random() < 0.7:
            self.later(0.3, partial(proc.fail, group, "a peer was lost before"))

    def committed(self, proc: Process) -> None:
        assert proc.held is not None
        top = max(self.committed_by.values(), default=0)
        self.committed_by[proc.rank] = max(self.committed_by.get(proc.rank, 0), proc.held)
        self.check(proc.held <= top + 1, f"{proc} has skipped a step: {proc.held} after {top}")

    def meets(self, proc: Process) -> None:
        """A plan is carried out once all its members have come."""
        plan = proc.plan
        assert plan is not None
        come = self.meetings.setdefault(plan.incident, {})
        come[proc] = plan
        here = [
            one for one in come if one.alive and one.thread == "meeting" and one.plan is not None
        ]
        incarnations = {(one.rank, int(one.me.incarnation)) for one in here}
        wanted = {(int(member.rank), int(member.incarnation)) for member in plan.members}
        if incarnations != wanted:
            return
        by_rank = {one.rank: one for one in here}
        for one in here:
            self.check(one.plan is not None and one.plan.resume == plan.resume, "two plans met")
            source = by_rank[plan.sources.get(Rank(one.rank), Rank(one.rank))]
            self.check(
                source.held == plan.resume,
                f"{one} would resume at {plan.resume} from {source}, which holds {source.held}",
            )
        best = max(one.held for one in here if one.held is not None)
        self.check(
            plan.resume == best, f"step {best} is lost without need: resumes at {plan.resume}"
        )
        group = Group(tuple(here), plan.incident)
        for one in here:
            self.later(0.2, partial(one.repaired, plan, group))

    # Faults

    def _living(self) -> list[Process]:
        return sorted(self.procs.values(), key=lambda proc: (proc.rank, proc.me.incarnation))

    def kill_one_that_trains(self) -> None:
        if self.begun:
            self.kill_someone()

    def kill_someone(self) -> None:
        if living := self._living():
            self.exits(self.random.choice(living), None, "killed by chance")

    def cut_one(self) -> None:
        proc = self.random.choice(self._living())
        group = proc.group
        if isinstance(group, Group):
            self.note(f"a connection of {proc} is cut")
            for one in group.members:
                if self.random.random() < 0.5:
                    self.later(0.1, partial(one.fail, group, "a connection was cut"))
            self.later(0.1, partial(proc.fail, group, "a connection was cut"))

    def disturb(self) -> None:
        if self.exit_code is not None:
            return
        procs = self._living()
        match self.random.choice(TROUBLE):
            case "kill":
                self.kill_someone()
            case "error" if procs:
                proc = self.random.choice(procs)
                line = self.random.choice([12, 12, 60])
                error = m.ScriptError(("ValueError",), f"train.py:{line}", "bad batch")
                self.exits(proc, 1, str(error), error)
            case "hang" if procs:
                proc = self.random.choice(procs)
                proc.hung = True
                self.note(f"{proc} hangs")
                seen_s = HANG_SEEN_S if self.random.random() < 0.9 else 3 * OUTAGE_S
                self.at(self.now + seen_s, partial(self._hang_seen, proc))
            case "cut" if procs:
                self.cut_one()
            case "node" if self.random.random() < 0.4:
                self.kill_agent(self.random.choice(list(self.agents)))
            case "manager":
                self.kill_manager()
            case "stream":
                self.break_stream(1.0)
            case "outage":
                self.break_stream(OUTAGE_S)
            case "end" if self.random.random() < 0.2:
                self.step_manager(StopRequested(1, "stopped by the operator"))
            case "operation":
                self._decide(cd.OperatorAskedNic((Rank(0),), (True,)))
            case "fault":
                by_hand = Fault(Rank(self.random.randrange(self.size)), evidence="by hand")
                self._decide(cd.FaultReport((by_hand,)))
            case "blip":
                node = self.random.choice(list(self.agents))
                self.blip(node, self.random.uniform(0.2, SILENCE_S))
            case "relink":
                self._connect(self.random.choice(list(self.agents)), self.manager_incarnation)
            case _:
                pass

    def _hang_seen(self, proc: Process) -> None:
        if proc.alive and self.exit_code is None:
            why = f"{proc} has made no progress for 5 s"
            stopped = proc.rank % 2 == 1
            self.step_manager(RankHung(Rank(proc.rank), proc.me.incarnation, why, stopped))
            self.at(self.now + HANG_SEEN_S, partial(self._hang_seen, proc))


def _name(value: object) -> str:
    return type(value).__name__


def _rank_in(source: str) -> int:
    return int(source.removeprefix("rank ").split(".")[0])
