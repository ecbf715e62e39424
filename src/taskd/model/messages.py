"""The messages that the manager, agents and workers send each other on the bus.

The first half are the messages of Ascend's TaskD; `wire/bus_bodies.py` has their codes and JSON.
The second half are our own: in-process recovery needs more information than Ascend's messages
carry. The field names of our own messages are their JSON names on the wire.

The module is long because it is a list: a reader finds everything that crosses the bus here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.profiling import Pace

NOTHING: Mapping[str, str] = MappingProxyType({})
FIRST_STEP, NO_TURN = Step(0), Step(-1)


# Ascend's messages


@dataclass(frozen=True, slots=True)
class AgentRegistered:
    """An agent has joined, or has joined again."""


@dataclass(frozen=True, slots=True)
class WorkerRegistered:
    """A worker has joined, or has joined again."""


@dataclass(frozen=True, slots=True)
class KeptAlive:
    """A keep-alive. A worker sends it without ranks."""

    fault_ranks: tuple[Rank, ...] = ()
    restart_times: int = -1


@dataclass(frozen=True, slots=True)
class RestartsLeft:
    """An agent requests permission to start its workers and names its restart budget."""

    remaining: int


@dataclass(frozen=True, slots=True)
class RanksFailed:
    """These ranks of the agent's node have died. An empty list: the agent is leaving."""

    ranks: tuple[Rank, ...]
    reported_at_s: int | None = None
    restart_times: int = -1


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Kill all workers of the node and exit with 1."""


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Permission to start all workers, with the restart budget that is left."""

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
    """Move these ranks to another network interface: True: the backup, False: the primary."""

    uuid: str
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class NicSwitched:
    uuid: str
    ok: bool


@dataclass(frozen=True, slots=True)
class RunStressTest:
    """Which tests (0 compute, 1 peer-to-peer) each rank must run."""

    uuid: str
    ops: Mapping[Rank, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StressTested:
    """Per test its code (0 ok, 1 failed, 2 fault, 3 timeout, 4 undecided) and a text."""

    uuid: str
    results: Mapping[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SetProfiling:
    default_domain: bool
    communication: bool
    parts: tuple[str, ...] = ()
    """The parts to record, by Ascend's names. Empty: everything in the two domains."""


@dataclass(frozen=True, slots=True)
class ProfilingSet:
    """0 off, 1 on, 2 failed, for each of the two domains."""

    default_domain: int
    communication: int


@dataclass(frozen=True, slots=True)
class Unknown:
    """A well-formed body that this version does not know. It is relayed, but not acted on."""

    msg_type: str
    code: int
    message: str = ""
    extension: Mapping[str, str] = field(default_factory=lambda: NOTHING)


# Ours, worker to manager


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Sent after every (re)connection, so that a restarted manager can rebuild its view."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    pid: int
    incident: Incident
    step: Step
    phase: str
    """joining (needs state), training or parked"""
    protected: bool
    """False: the process cannot be repaired while it runs, only restarted."""
    shard: str = ""
    """Ranks with the same shard hold the same state. Empty: the whole state, as under DDP."""
    replica: int = -1
    """Which complete copy of the state the rank belongs to. -1: it is a copy by itself."""
    without: tuple[Rank, ...] = ()
    """The ranks that the job trains without since it has shrunk."""
    own_since: int = -1
    """From this step on it also has state that no other rank has (`own_name`). -1: it has none."""


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """The worker is alive, but its step failed: a connection, a collective or its own memory."""

    rank: Rank
    incarnation: Incarnation
    incident: Incident
    kind: FaultCause
    """COMMUNICATION, CORRUPT, MISCOMPUTED or EXCEPTION"""
    evidence: str


def own_name(rank: int) -> str:
    """The name of what only this rank has, among the names of shards."""
    return f"own-{rank}"


@dataclass(frozen=True, slots=True)
class Copy:
    """A snapshot that survives its rank: in the node's shared memory, or held by a buddy."""

    shard: str
    step: Step


@dataclass(frozen=True, slots=True)
class Parked:
    """The worker is parked between two steps and holds the state of `step`."""

    rank: Rank
    incarnation: Incarnation
    incident: Incident
    step: Step
    whole: bool
    """False: the worker holds no complete state that other ranks could copy."""
    undo: bool = False
    """True: it can also roll back to `step - 1` by itself."""
    copies: tuple[Copy, ...] = ()
    """Snapshots that it can give besides: of its own shard or of others."""
    earliest: Step = FIRST_STEP
    """Its script cannot go back before this step: to resume earlier, it needs a new process."""
    turn: Step = NO_TURN
    """The step whose turn it is in the script's loop over attempts."""
    sections: int = 0
    """How many sections of this turn are complete; with NO_TURN, of the set-up."""
    outside: str = ""
    """The line of the script that has exchanged data in this turn outside of steps and sections."""


@dataclass(frozen=True, slots=True)
class Repaired:
    rank: Rank
    incarnation: Incarnation
    incident: Incident
    step: Step
    groups_s: float = 0.0
    """How long it took to form the process groups."""
    state_s: float = 0.0
    """How long the state transfer took."""


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
    """The worker has written its part of the emergency checkpoint, or could not."""

    rank: Rank
    incident: Incident
    step: Step
    because: str = ""
    """Empty on success."""


# Ours, manager to worker


@dataclass(frozen=True, slots=True)
class RequestHello:
    """Send WorkerHello or AgentHello again. A manager that has just started requests this from the
    workers, whose connection to the proxy never broke, so that they do not notice the restart; and
    any manager from a node that was silent and has come back over the same connection."""


@dataclass(frozen=True, slots=True)
class Park:
    """Abort the process groups, abandon the current step, park, and reply with `Parked`."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class Member:
    rank: Rank
    node: NodeRank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Repair:
    """Form new process groups, copy state from your source if you have one, resume at `resume`."""

    incident: Incident
    strategy: str
    members: tuple[Member, ...]
    resume: Step
    sources: Mapping[Rank, Rank]
    """The source of each rank that copies its state. A rank that is not named keeps its own."""
    store: str
    """host:port of the store where the groups rendezvous, under a prefix of the incident."""
    timeout_s: float
    without: tuple[Rank, ...] = ()
    """The ranks of the job that do not take part any more."""
    helpers: Mapping[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Further ranks that send a receiver a part of a large state, in addition to its source."""
    own_sources: Mapping[Rank, Rank] = field(default_factory=dict)
    """Which rank sends each of these ranks the copy of what only it had."""
    own_since: int = -1
    """As in `WorkerHello`, for the new processes."""
    shards: Mapping[Rank, str] = field(default_factory=dict)
    """The shards of the new processes. They cannot know them before they have state."""
    turn: Step = NO_TURN
    """The first turn of the script's loop that not all ranks have completed: `resume`, or the one
    before it. NO_TURN: the ranks are in the set-up, or do not iterate over attempts."""
    sections: int = 0
    """How many sections of that turn are complete."""


@dataclass(frozen=True, slots=True)
class Dump:
    """Write one complete checkpoint of `step` together with the other members, then exit."""

    incident: Incident
    step: Step
    directory: str
    members: tuple[Member, ...]
    store: str = ""
    """As in `Repair`."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Exit: the job is over, or continues without this rank."""

    incident: Incident
    because: str
    incarnation: int = -1
    """The incarnation that must exit: a bus address names a rank, not an incarnation. -1: any."""


# Ours, agent to manager


@dataclass(frozen=True, slots=True)
class LocalWorker:
    rank: Rank
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class RankShard:
    """Which shard a rank holds, as its WorkerHello said."""

    rank: Rank
    shard: str
    replica: int


@dataclass(frozen=True, slots=True)
class AgentHello:
    """Sent after every (re)connection, so that a restarted manager can rebuild its view."""

    node: NodeRank
    host: str
    workers: tuple[LocalWorker, ...]
    store: str
    """host:port of the store that this agent serves; empty: it serves none."""
    attempt: int = 0
    """How many times the whole job has been restarted, as far as this agent knows."""
    remaining: int = -1
    """The restart budget of the manager's last message; -1: none was received."""
    liveness_port: str = ""
    """host:port of the agent's liveness port; empty: it has none."""
    warm: bool = True
    """Whether new ranks can run on this node at once."""
    condemned: str = ""
    """Why a manager has marked this node as bad after a stress test; empty: it has not."""
    shards: tuple[RankShard, ...] = ()
    """What a manager has given this agent to keep: the shards of all ranks, also of lost ones."""


@dataclass(frozen=True, slots=True)
class WorkersStarted:
    node: NodeRank
    workers: tuple[LocalWorker, ...]


@dataclass(frozen=True, slots=True)
class ScriptError:
    """The exception that ended a training script."""

    types: tuple[str, ...]
    """The name of its class, then those of the base classes."""
    place: str
    """file:line where it was raised."""
    message: str

    @property
    def name(self) -> str:
        return self.types[0] if self.types else "Exception"

    def same_as(self, other: ScriptError) -> bool:
        """The same exception at the same place. Its text may differ: it may name a step."""
        return (self.name, self.place) == (other.name, other.place)

    def __str__(self) -> str:
        text = f"{self.name}: {self.message}" if self.message else self.name
        return f"{text} ({self.place})" if self.place else text


@dataclass(frozen=True, slots=True)
class WorkerExited:
    rank: Rank
    incarnation: Incarnation
    pid: int
    exit_code: int | None
    signal: int | None
    evidence: str
    """The last traceback or the last lines of its log."""
    script_ended: bool = False
    """The script had ended without an error before its process did."""
    error: ScriptError | None = None
    """The exception that ended the script; None: another reason, or not known."""
    step: Step = FIRST_STEP
    """How many steps it had committed."""

    @property
    def finished(self) -> bool:
        """Whether the rank has done its work, however its process ended."""
        return self.exit_code == 0 or self.script_ended


@dataclass(frozen=True, slots=True)
class Progress:
    rank: Rank
    incarnation: Incarnation
    step: Step
    idle_s: float
    """Time without progress: no step, no collective, no batch."""
    waiting: bool
    """Inside a collective: it waits for other ranks."""
    collective: int
    """How many collectives this rank has entered since its last step. Those outside of steps are
    not counted."""
    judged: bool = True
    """False: a debugger has stopped it."""
    busy: bool = False
    """It used CPU or disk during the idle time: perhaps slow, but it works."""
    stopped: bool = False
    """Stopped by a signal, not by a debugger."""
    stack: str = ""
    """The stacks of its threads, sent once each time it looks stuck."""
    spinning: bool = False
    """Inside a step it executes the same few lines of Python again and again."""
    moving_s: float = 0.0
    """The idle time at which it last did something new: its stack changed, it read, wrote or
    allocated memory, or its child processes worked. Time in which it got no CPU is added."""
    total: int = 0
    """How many steps the whole training has; 0: not known."""
    phase: str = "training"
    """Of its beacon; "loading": it has not called `taskd.init` yet."""


@dataclass(frozen=True, slots=True)
class LinkCounter:
    """A counter of the kernel that grows when a link does not work well."""

    link: str
    counter: str
    value: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What an agent knows about its node beside its ranks. No decision depends on it."""

    links: tuple[LinkCounter, ...] = ()
    copies: tuple[Rank, ...] = ()
    """The ranks of whose state a copy lies in the node's memory."""


@dataclass(frozen=True, slots=True)
class NodeHeartbeat:
    """An agent's heartbeat, with the progress of its ranks."""

    node: NodeRank
    progress: tuple[Progress, ...]
    paces: tuple[Pace, ...] = ()
    """Of the ranks that are being profiled."""
    facts: NodeFacts | None = None
    """None: as in the last heartbeat that had them."""


# Ours, manager to agent


@dataclass(frozen=True, slots=True)
class ReplaceWorkers:
    """Start these incarnations of these ranks. What is left of older incarnations is killed."""

    incident: Incident
    workers: tuple[Member, ...]
    store: str = ""
    """host:port of the store that new processes use; empty: the one of the first start."""


@dataclass(frozen=True, slots=True)
class RestartJob:
    """Kill all workers of the node and start them again, as the next attempt."""

    incident: Incident
    attempt: int
    workers: tuple[Member, ...]
    store: str = ""
    """As in `ReplaceWorkers`."""


@dataclass(frozen=True, slots=True)
class KeepShards:
    """Keep this and repeat it in every AgentHello: a restarted manager cannot ask lost ranks."""

    shards: tuple[RankShard, ...]


@dataclass(frozen=True, slots=True)
class EndWorkers:
    """Kill these incarnations, if they run: the job has replaced them or continues without them."""

    workers: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class EndJob:
    """Stop all workers and end the agent with this exit code.

    From an agent to the manager: an operator has stopped this node, and with it the job.
    """

    exit_code: int
    because: str


@dataclass(frozen=True, slots=True)
class NodeMarkedBad:
    """To an agent: a device of its node is broken. The agent repeats this in every AgentHello."""

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
    | EndWorkers
    | KeepShards
    | EndJob
    | NodeMarkedBad
)
Body = Upstream | Ours
