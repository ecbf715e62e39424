"""What travels on the bus between the manager, agents and workers.

The first half are the messages of Ascend's TaskD; `wire/bus_bodies.py` knows their codes and
spelling. The second half are ours: in-process recovery needs to say more than upstream can.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.profiling import Pace

NOTHING: Mapping[str, str] = MappingProxyType({})


# Ascend's messages


@dataclass(frozen=True, slots=True)
class AgentRegistered:
    """An agent has joined, or has joined again."""


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker has joined, or has joined again."""


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """A sign of life. A worker sends it with no ranks."""

    fault_ranks: tuple[Rank, ...] = ()
    restart_times: int = -1


@dataclass(frozen=True, slots=True)
class RestartsLeft:
    """An agent asks for permission to start its workers; this is its restart budget."""

    remaining: int


@dataclass(frozen=True, slots=True)
class RanksFailed:
    """These ranks of the agent's node have died. None at all: the agent is leaving."""

    ranks: tuple[Rank, ...]
    reported_at_s: int | None = None
    restart_times: int = -1


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Kill all workers of the node and exit with 1."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """The permission to start all workers, with the restart budget that now holds."""

    remaining: int


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Kill all workers of the node and start them again."""

    remaining: int


@dataclass(frozen=True, slots=True)
class RestartWorkers:
    """Kill and start these ranks only."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """Kill these ranks and do not start them again."""

    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True)
class SwitchNic:
    """Move the links of these ranks: True to the backup, False back to the primary."""

    uuid: str
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class NicSwitched:
    uuid: str
    ok: bool


@dataclass(frozen=True, slots=True)
class RunStressTest:
    """Which operations (0 compute, 1 peer-to-peer) each rank is to run."""

    uuid: str
    ops: Mapping[Rank, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StressTested:
    """For each operation its code (0 ok, 1 failed, 2 fault, 3 timeout, 4 unsettled) and text."""

    uuid: str
    results: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SetProfiling:
    default_domain: bool
    communication: bool
    parts: tuple[str, ...] = ()
    """Exactly what is wanted, by Ascend's names. None named: the whole domains."""


@dataclass(frozen=True, slots=True)
class ProfilingSet:
    """0 off, 1 on, 2 failed, for each of the two domains."""

    default_domain: int
    communication: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A well-formed body that this version does not know. It is passed on, never acted on."""

    msg_type: str
    code: int
    message: str = ""
    extension: Mapping[str, str] = field(default_factory=lambda: NOTHING)


# Ours, worker to manager


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Said after every (re)connection, so that a restarted manager learns what is true."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    pid: int
    incident: Incident
    step: Step
    phase: str
    """joining (needs state), training, parked"""
    protected: bool
    """False: the script cannot be repaired from inside, only restarted."""
    shard: str = ""
    """Ranks with the same shard hold the same state. Empty: the whole state, as under DDP."""
    replica: int = -1
    """Which complete copy of the state the rank belongs to. -1: it is a copy by itself."""
    without: tuple[Rank, ...] = ()
    """The ranks that it trains without, since the job has shrunk."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker is alive, but its step has failed: a link, a collective, its own memory."""

    rank: Rank
    incarnation: Incarnation
    incident: Incident
    kind: str
    """communication, corrupt, exception"""
    evidence: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot that outlives its rank: in the node's shared memory, or kept by a buddy."""

    shard: str
    step: Step


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker stands still between two steps and holds the state of `step`."""

    rank: Rank
    incarnation: Incarnation
    incident: Incident
    step: Step
    whole: bool
    """False: the worker holds no state that could be given to others."""
    undo: bool = False
    """True: it can also go back to `step - 1` by itself."""
    copies: tuple[Copy, ...] = ()
    """What else it can give: snapshots of its own shard or of others."""


@dataclass(frozen=True, slots=True)
class Repaired:
    rank: Rank
    incarnation: Incarnation
    incident: Incident
    step: Step
    groups_s: float = 0.0
    """How long forming the groups took."""
    state_s: float = 0.0
    """How long giving and taking state took."""


@dataclass(frozen=True, slots=True)
class RepairFailed:
    rank: Rank
    incarnation: Incarnation
    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The first step that the worker has committed since the incident."""

    rank: Rank
    incarnation: Incarnation
    incident: Incident
    step: Step


@dataclass(frozen=True, slots=True)
class Dumped:
    """The worker has written its part of the last checkpoint, or has failed to."""

    rank: Rank
    incident: Incident
    step: Step
    because: str = ""
    """Empty on success."""


# Ours, manager to worker


@dataclass(frozen=True, slots=True)
class RequestHello:
    """Say hello again. A manager that has just started asks: the worker's own link to the proxy
    has not been broken, so the worker would not know."""


@dataclass(frozen=True, slots=True)
class Park:
    """Abort the groups, abandon the step in flight, stand still and say where."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class Member:
    rank: Rank
    node: NodeRank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Repair:
    """Form the groups anew, take state from your source if you have one, go on at `resume`."""

    incident: Incident
    strategy: str
    members: tuple[Member, ...]
    resume: Step
    sources: Mapping[Rank, Rank]
    """Who takes its state from whom. A rank that is not named keeps its own."""
    store: str
    """host:port of the store where the groups meet, under a prefix of the incident."""
    timeout_s: float
    without: tuple[Rank, ...] = ()
    """The job's other ranks: it goes on without them."""
    helpers: Mapping[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Who gives a taker a part of a large state, beside its source."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Write one complete checkpoint of `step` together, then exit."""

    incident: Incident
    step: Step
    directory: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Leave:
    """End the process: the job is over, or goes on without this rank."""

    incident: Incident
    because: str
    life: int = -1
    """The incarnation that is meant: an address names a rank, not a life. -1: whoever hears it."""


# Ours, agent to manager


@dataclass(frozen=True, slots=True)
class LocalWorker:
    rank: Rank
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class AgentHello:
    """Said after every (re)connection, so that a restarted manager learns what is true."""

    node: NodeRank
    host: str
    workers: tuple[LocalWorker, ...]
    store: str
    """host:port of the store that this agent serves; empty when it serves none."""
    attempt: int = 0
    """How many times the whole job has been restarted, as far as this agent knows."""
    remaining: int = -1
    """The restart budget that it was last told; -1 when it never was."""
    door: str = ""
    """host:port where the agent itself listens while it lives; empty: nowhere."""
    warm: bool = True
    """Whether ranks that it is told to start could run at once."""
    condemned: str = ""
    """What a stress test has found on this node, as a manager once told it; empty: nothing."""


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    node: NodeRank
    workers: tuple[LocalWorker, ...]


@dataclass(frozen=True, slots=True)
class WorkerExited:
    rank: Rank
    incarnation: Incarnation
    pid: int
    exit_code: int | None
    signal: int | None
    evidence: str
    """The last traceback or the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Progress:
    rank: Rank
    incarnation: Incarnation
    step: Step
    idle_s: float
    """How long nothing has moved: no step, no collective, no batch."""
    waiting: bool
    """Inside a collective, that is, waiting for others."""
    collective: int
    """How many collectives this rank has entered."""
    judged: bool = True
    """False: it stands still for a good reason (starting, parked, repairing, leaving)."""
    busy: bool = False
    """While nothing moved it has used a processor or a disk: slow perhaps, but at work."""
    stopped: bool = False
    """Stopped by a signal or a debugger."""
    stack: str = ""
    """Where its threads stand, told once each time it seems stuck."""
    spinning: bool = False
    """Inside a step, at work in the same few lines of Python, again and again."""
    moving_s: float = 0.0
    """So much of the idle time had passed when it was last seen to do something new: its stack
    was another, it read or wrote, took memory, or its children worked."""


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """An agent's heartbeat, with the progress of its ranks."""

    node: NodeRank
    progress: tuple[Progress, ...]
    paces: tuple[Pace, ...] = ()
    """Of those ranks that are recorded."""


# Ours, manager to agent


@dataclass(frozen=True, slots=True)
class ReplaceWorkers:
    """Start these ranks anew, in these lives; whatever is left of older lives is killed."""

    incident: Incident
    workers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class RestartJob:
    """Kill every worker of the node and start all of them anew, as one attempt."""

    incident: Incident
    attempt: int
    workers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class EndJob:
    """Stop all workers and end the agent with this exit code.

    From an agent to the manager: a person has stopped this node, and with it the job.
    """

    exit_code: int
    because: str


@dataclass(frozen=True, slots=True)
class NodeMarkedBad:
    """To an agent: its node has failed a stress test. It says so to the managers that follow."""

    evidence: str


Upstream = (
    AgentRegistered
    | WorkerRegistered
    | KeptAlive
    | RestartsLeft
    | RanksFailed
    | ExitAgent
    | StartWorkers
    | RestartAgent
    | RestartWorkers
    | StopWorkers
    | SwitchNic
    | NicSwitched
    | RunStressTest
    | StressTested
    | SetProfiling
    | ProfilingSet
    | Unknown
)
Ours = (
    WorkerHello
    | WorkerFailed
    | Parked
    | Repaired
    | RepairFailed
    | Committed
    | Dumped
    | RequestHello
    | Park
    | Repair
    | Dump
    | Leave
    | AgentHello
    | WorkersStarted
    | WorkerExited
    | NodeHeartbeat
    | ReplaceWorkers
    | RestartJob
    | EndJob
    | NodeMarkedBad
)
Body = Upstream | Ours
