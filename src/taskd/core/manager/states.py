"""The states of the manager's machine, and the facts about the job that all of them carry.

    Gathering -> Training -> Suspecting -> Reported -> Stopping -> Deciding -> Repairing -> Resuming
                    ^                                     |           |  |-> Restarting     |
                    |                                   Paused        |  |-> Dumping        |
                    +-------------------------------------------------+---------------------+

and from every state to Ending -> Ended. A new fault in a later state leads back to Reported.
`machine.py` decides; events and commands are in `model/manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from taskd.core.manager.job_view import NO_STEP, JobView, ProcessState, initial_view
from taskd.core.manager.repair.repair_plan import Holder, Plan
from taskd.core.rank_sets import RankSet, RankTable
from taskd.model import types
from taskd.model.clusterd import ExpectedReport, Signal
from taskd.model.faults import Fault, FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.manager import NO_INCIDENT, Command, IncidentRecord
from taskd.model.messages import Parked, ScriptError

UNLIMITED_RESTARTS = 32767
"""The restart budget when none is configured, as Ascend counts."""
FIRST_RANK = Rank(0)
SIGNALS_KEPT = 64
ANSWERS_KEPT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    nodes: int = 1
    """How many nodes the job starts with."""

    ranks_per_node: int = 1
    """How many ranks each node runs."""

    max_restarts: int = UNLIMITED_RESTARTS
    """How often all ranks may be restarted; 0: never. The default, 32767, counts as no limit.
    In-process repairs are not counted."""

    rescheduling: bool = False
    """The cluster brings back or replaces a lost node; otherwise only spare nodes can."""

    mindspore: bool = False
    """Ascend's agents of a MindSpore job have no restart budget, although they always send 1."""

    dump_dir: str = "taskd-dump"
    """Where the surviving ranks write the emergency checkpoint."""

    fruitless_limit: int = 5
    """After this many incidents in a row without progress, ranks are not replaced any more."""

    settled_s: float = 30.0
    """A job whose steps are not visible has made progress when it has run this long."""

    suspicion_s: float = 0.05
    """How long to wait, after a failed collective, for the death of a rank that explains it."""

    report_timeout_s: float = 10.0
    """How long clusterd may take to order the stop before the fault is reported again."""

    stop_timeout_s: float = 15.0
    """How long a rank may take to park before it counts as failed."""

    decide_timeout_s: float = 120.0
    """How long clusterd may take to decide before the fault is reported again."""

    repair_timeout_s: float = 120.0
    """How long the ranks may take to form process groups and to copy their state."""

    unlinked_s: float = 0.7
    """How long to wait for a disconnected node when only its ranks have not parked."""

    setback_s: float = 0.5
    """How long to wait, after a failed repair, for the death of a rank that explains it."""

    regrow_s: float = 10.0
    """How long a job that shrank soon after it had grown waits before it grows again; doubled each
    time."""

    node_timeout_s: float = 300.0
    """How long a lost node may take to come back when the strategy needs it."""

    resume_timeout_s: float = 900.0
    """How long the first step after a repair may take."""

    restart_timeout_s: float = 300.0
    """How long the agents may take to restart all ranks."""

    dump_timeout_s: float = 900.0
    """How long the emergency checkpoint may take."""

    pause_timeout_s: float = 7200.0
    """How long an operation may pause training when clusterd sends no limit."""

    end_timeout_s: float = 15.0
    """How long the agents may take to exit when the job has ended."""

    join_timeout_s: float = 600.0
    """How long the nodes may take to join at the start."""

    rebuild_timeout_s: float = 10.0
    """How long the other nodes may take to join a restarted manager after the first one."""

    lost_contact_s: float = 900.0
    """How long clusterd may leave a fault report unanswered before the job is ended."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")
        for name in (item for item in self.__slots__ if item.endswith("_s")):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class LastError:
    """The script's error in the last fault."""

    error: ScriptError
    incarnation: Incarnation
    """The newest of the ranks that failed with it."""


@dataclass(frozen=True, slots=True)
class Job:
    """The facts about the job that every state carries."""

    view: JobView
    world: RankSet
    """The ranks that train together; fewer than all after a shrink."""
    incident: Incident = NO_INCIDENT
    uuid: str = ""
    offset: int = 0
    """How far our incident number is ahead of clusterd's, in case clusterd has lost count."""
    ascend: bool = False
    """clusterd is Ascend's: it does not number incidents and does not know our strategy names."""
    mindio: bool = False
    """MindIO watches and repairs the ranks: this machine only lets agents start them."""
    faults: Mapping[Rank, Fault] = field(default_factory=dict)
    parked: RankTable[Parked] = field(default_factory=RankTable)
    plan_sent: bool = False
    """The ranks have received a plan since they parked: their position is not known any more."""
    store: str = ""
    """host:port of the store that the last plan names: all its ranks must meet at the same one."""
    restarts_left: int = UNLIMITED_RESTARTS
    attempt: int = 0
    start_withheld: bool = False
    start_requests: Mapping[NodeRank, int] = field(default_factory=dict)
    """Agents that wait for permission to start, and the restart budgets that they sent."""
    rebuilt: bool = False
    """This manager process started while ranks were running: some may have died unnoticed."""
    disconnected: Mapping[NodeRank, float] = field(default_factory=dict)
    """Nodes that are disconnected, and since when."""
    permitted: frozenset[NodeRank] = frozenset()
    """Nodes that this manager process has permitted to start."""
    handled: tuple[object, ...] = ()
    """Keys of the signals that have been carried out, newest last."""
    answers: Mapping[object, tuple[ExpectedReport, ...]] = field(default_factory=dict)
    """What was reported after each of the last signals, by its key: clusterd may have missed it."""
    fruitless: int = 0
    """Incidents in a row without progress."""
    last_error: LastError | None = None
    """The script's error that caused the last fault, if there was no progress since."""
    stalled: bool = False
    """After the last repair no rank continued: the next one would end in the same way."""
    hopeless: str = ""
    """Why another start would only repeat the script's error; no rank is replaced any more."""
    may_pass: bool = False
    """Whether such an error may have gone when the whole job is started again, later."""
    bad_nodes: frozenset[NodeRank] = frozenset()
    """Nodes with a broken device, where no cluster can replace them: see `bad_nodes.py`."""
    growths: int = 0
    """How often in a row the job has grown and had to shrink again soon after."""
    offered: bool = False
    """clusterd knows that the job could grow now."""
    grown_at: float = -inf
    """When the job last began to grow."""
    best: Step = NO_STEP
    """The highest step that any rank has reached."""
    settled_at: float = inf
    """When a job whose steps are not visible counts as having made progress."""
    open_incident: IncidentRecord | None = None
    past_incidents: tuple[IncidentRecord, ...] = ()

    def with_store(self) -> Job:
        """With the store for a new plan: the last one, as long as its node is present."""
        if self.store in self.view.stores():
            return self
        return replace(self, store=self.view.store())

    def broken(self) -> RankSet:
        """Ranks of the world that need a new process."""
        views = self.view.ranks
        return RankSet(
            rank
            for rank in self.world
            if views[rank].process is not ProcessState.ALIVE
            or (rank in self.faults and not self.faults[rank].kind.retryable)
        )

    def running(self) -> RankSet:
        return self.world & self.view.alive()

    def starting(self) -> bool:
        return any(self.view.ranks[rank].process is ProcessState.STARTING for rank in self.world)

    def protected(self) -> bool:
        """Whether every rank can be repaired while it runs, or could in its last incarnation."""
        views = [self.view.ranks[rank] for rank in self.world]
        unheard = [
            v
            for v in views
            if self.rebuilt and v.process is not ProcessState.ALIVE and not v.said_hello
        ]
        return len(unheard) < len(views) and all(v.protected for v in views if v not in unheard)

    def holders(self) -> tuple[Holder, ...]:
        """The parked ranks, with the state that they hold."""
        left = self.world - self.broken()
        return tuple(self._holder(rank) for rank in sorted(left) if self.is_parked(rank))

    def is_parked(self, rank: Rank) -> bool:
        """Its current process, not a former one that was cut off."""
        parked = self.parked.get(rank)
        return parked is not None and parked.incarnation == self.view.ranks[rank].incarnation

    def _holder(self, rank: Rank) -> Holder:
        view, parked = self.view.ranks[rank], self.parked[rank]
        corrupt = rank in self.faults and self.faults[rank].cause is FaultCause.CORRUPT
        return Holder(
            rank,
            view.node,
            view.incarnation,
            parked.step,
            whole=parked.whole and not corrupt,
            undo=parked.undo,
            shard=view.shard,
            replica=view.replica,
            copies=parked.copies,
            earliest=parked.earliest,
            own_since=view.own_since,
            turn=parked.turn,
            sections=parked.sections,
            outside=parked.outside,
        )

    def known_faults(self) -> tuple[Fault, ...]:
        return tuple(self.faults[rank] for rank in sorted(self.faults))


def initial_job(config: JobConfig) -> Job:
    view = initial_view(config.nodes, config.ranks_per_node)
    return Job(view, RankSet(view.ranks), restarts_left=config.max_restarts)


@dataclass(frozen=True, slots=True)
class Inherited:
    """What a new leader knows of the job before any node has said hello."""

    unheard: frozenset[NodeRank]
    """Nodes that have neither said hello nor been found lost."""
    epoch: int
    lost: Mapping[NodeRank, tuple[FaultCause, str]] = field(default_factory=dict)
    """The nodes that are lost, each with the reason."""


# The states


@dataclass(frozen=True, slots=True)
class Gathering:
    """The nodes join, or a restarted manager rebuilds its view of the job."""

    job: Job
    deadline: float
    rebuilding: bool = False
    """Ranks ran before this manager process: it decides nothing before its view is complete."""
    awaited: Rank = FIRST_RANK
    """The first rank that is not known yet."""
    deferred: tuple[Signal, ...] = ()
    """Signals of clusterd that are carried out when the view is complete."""
    inherited: Inherited | None = None
    """The nodes of a job that another manager led before; None: they are not known."""


@dataclass(frozen=True, slots=True)
class Training:
    job: Job
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Suspecting:
    """A collective has failed. If the cause is the death of a rank, its report follows soon."""

    job: Job
    silent: RankSet
    """The ranks that have not reported a failed collective yet."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Reported:
    """The fault has been reported to clusterd; its order to stop has not come yet."""

    job: Job
    since: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Stopping:
    job: Job
    running: RankSet
    order: Signal
    """What to do once all ranks are parked. A plain stop is only reported."""
    deadline: float
    limit: float = inf
    """When the last ranks count as stuck; `deadline` is earlier for disconnected nodes."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """All ranks are parked; clusterd decides."""

    job: Job
    deadline: float


@dataclass(frozen=True, slots=True)
class Paused:
    """All ranks are parked for an operation, such as a stress test."""

    job: Job
    deadline: float


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The strategy needs a node that has not joined yet."""

    job: Job
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class Repairing:
    job: Job
    order: Signal
    plan: Plan
    unrepaired: RankSet
    uncommitted: RankSet
    deadline: float
    setback: str = ""
    """Why a rank could not be repaired. Until the deadline, a death may still explain it."""


@dataclass(frozen=True, slots=True)
class Resuming:
    """All ranks are repaired; their first step is running."""

    job: Job
    order: Signal
    plan: Plan
    uncommitted: RankSet
    deadline: float


@dataclass(frozen=True, slots=True)
class Restarting:
    job: Job
    order: Signal
    unstarted: RankSet
    deadline: float


@dataclass(frozen=True, slots=True)
class Dumping:
    job: Job
    order: Signal
    unwritten: RankSet
    deadline: float


@dataclass(frozen=True, slots=True)
class Ending:
    """The agents have been ordered to end; the manager waits until they have left."""

    job: Job
    exit_code: int
    because: str
    staying: frozenset[NodeRank]
    deadline: float


@dataclass(frozen=True, slots=True)
class Ended:
    job: Job
    exit_code: int
    because: str
    deadline: float = inf


State = (
    Gathering
    | Training
    | Suspecting
    | Reported
    | Stopping
    | Deciding
    | Paused
    | Awaiting
    | Repairing
    | Resuming
    | Restarting
    | Dumping
    | Ending
    | Ended
)


Outcome = types.Outcome[State, Command]


def then(before: Outcome, after: Outcome) -> Outcome:
    """Two outcomes in sequence, as one outcome."""
    because = "; ".join(filter(None, (before.because, after.because)))
    return Outcome(after.state, before.commands + after.commands, because)


def with_job(state: State, **facts: object) -> State:
    """The same state with these fields of its job replaced."""
    return replace(state, job=replace(state.job, **facts))  # type: ignore[arg-type]
