"""The states of the manager's machine, and the facts that hold in all of them.

    Gathering -> Training -> Suspecting -> Reported -> Stopping -> Deciding -> Repairing -> Resuming
                    ^                                     |           |  |-> Restarting     |
                    |                                   Paused        |  |-> Dumping        |
                    +-------------------------------------------------+---------------------+

and from everywhere to Ending -> Ended. A new fault in a later state leads back to Reported. The
decisions are made in `core/manager` and the modules it names; the words are in `model/manager.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from taskd.core.manager.job_view import NO_STEP, JobView, ProcessState, initial_view
from taskd.core.manager.repair_plan import Holder, Plan
from taskd.core.rank_sets import RankSet, RankTable
from taskd.model import types
from taskd.model.clusterd import Signal
from taskd.model.faults import Fault, FaultCause, FaultKind
from taskd.model.ids import Incident, NodeRank, Rank, Step
from taskd.model.manager import NO_INCIDENT, Command, IncidentRecord
from taskd.model.messages import Parked

UNLIMITED_RESTARTS = 32767
"""The restart budget that stands for none or 0, as Ascend counts."""
SECONDARY = FaultKind.NETWORK
"""The kind of fault that a rank suffers when another one fails."""
FIRST_RANK = Rank(0)
RECORDS_KEPT = 100
SIGNALS_KEPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    nodes: int = 1
    """How many nodes the job starts with."""

    ranks_per_node: int = 1
    """How many ranks each node runs."""

    max_restarts: int = 0
    """How often all ranks may be started anew; 0 stands for 32767. Repair in place is free."""

    rescheduling: bool = False
    """A lost node may come back or be replaced by the cluster; otherwise only spare nodes help."""

    dump_dir: str = "taskd-dump"
    """Where the survivors write the last checkpoint."""

    fruitless_limit: int = 5
    """After so many incidents in a row without progress, replacing ranks is not offered again."""

    settled_s: float = 30.0
    """A job whose steps cannot be seen has made progress when it has run this long."""

    suspicion_s: float = 0.05
    """How long a failed collective may wait for the death that explains it."""

    report_timeout_s: float = 10.0
    """How long clusterd may take to order the stop before the fault is reported again."""

    stop_timeout_s: float = 15.0
    """How long a rank may take to park before it counts as failed."""

    decide_timeout_s: float = 120.0
    """How long clusterd may take to decide before the fault is reported again."""

    repair_timeout_s: float = 120.0
    """How long the ranks may take to form groups and to have their state."""

    unlinked_s: float = 0.7
    """How long a node without a link is waited for when only its ranks have not parked."""

    setback_s: float = 0.5
    """How long a failed repair may wait for the death that explains it."""

    regrow_s: float = 10.0
    """How long a job that had to shrink soon after it has grown waits before it grows again; twice
    as long each time."""

    node_timeout_s: float = 300.0
    """How long a lost node may take to come back when the strategy is to replace it."""

    resume_timeout_s: float = 900.0
    """How long the first step after a repair may take."""

    restart_timeout_s: float = 300.0
    """How long the agents may take to start all ranks anew."""

    dump_timeout_s: float = 900.0
    """How long the last checkpoint may take."""

    pause_timeout_s: float = 7200.0
    """How long an operation may pause training when clusterd names no limit."""

    end_timeout_s: float = 15.0
    """How long the agents may take to leave when the job has ended."""

    join_timeout_s: float = 600.0
    """How long the nodes may take to join at the start."""

    rebuild_timeout_s: float = 10.0
    """How long the other nodes may take to join once one has said that its ranks run already."""

    lost_contact_s: float = 900.0
    """How long a fault may wait for clusterd before the job is ended."""

    def __post_init__(self) -> None:
        for name in ("nodes", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (item for item in self.__slots__ if item.endswith("_s")):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Job:
    """What stays true in every state."""

    view: JobView
    world: RankSet
    """The ranks that train together; fewer than all after a shrink."""
    incident: Incident = NO_INCIDENT
    uuid: str = ""
    offset: int = 0
    """How far our count of incidents is ahead of clusterd's, if that has lost its own."""
    ascend: bool = False
    """clusterd is Ascend's: it numbers no incidents and knows none of our strategies' names."""
    faults: Mapping[Rank, Fault] = field(default_factory=dict)
    parked: RankTable[Parked] = field(default_factory=RankTable)
    plan_sent: bool = False
    """The ranks have been given a plan since they stood still: where they are now is not known."""
    restarts_left: int = UNLIMITED_RESTARTS
    attempt: int = 0
    start_withheld: bool = False
    start_requests: Mapping[NodeRank, int] = field(default_factory=dict)
    """Agents that wait for the permission to start, and the budgets that they named."""
    rebuilt: bool = False
    """This life of the manager began while ranks ran: some may have died unheard."""
    disconnected: Mapping[NodeRank, float] = field(default_factory=dict)
    """Nodes that have no link at present, and since when."""
    permitted: frozenset[NodeRank] = frozenset()
    """Nodes that this life of the manager has permitted to start."""
    handled: tuple[object, ...] = ()
    """Keys of the signals carried out, newest last."""
    fruitless: int = 0
    bad_nodes: frozenset[NodeRank] = frozenset()
    """Nodes whose devices have failed a stress test, where nobody can replace them."""
    growths: int = 0
    """How often in a row the job has grown and has soon had to shrink again."""
    offered: bool = False
    """It has said that it could grow now."""
    grown_at: float = -inf
    """When it last began to grow."""
    best: Step = NO_STEP
    """The highest step that any rank has reached."""
    settled_at: float = inf
    """When a job whose steps cannot be seen will count as having made progress."""
    open_incident: IncidentRecord | None = None
    past_incidents: tuple[IncidentRecord, ...] = ()

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
        """Every rank can be repaired from inside, or could in its last life."""
        views = [self.view.ranks[rank] for rank in self.world]
        unheard = [
            v
            for v in views
            if self.rebuilt and v.process is not ProcessState.ALIVE and not v.said_hello
        ]
        return len(unheard) < len(views) and all(v.protected for v in views if v not in unheard)

    def holders(self) -> tuple[Holder, ...]:
        """The ranks that stand still, with what they hold."""
        broken = self.broken()
        return tuple(
            self._holder(rank) for rank in sorted(self.world - broken) if rank in self.parked
        )

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
        )

    def known_faults(self) -> tuple[Fault, ...]:
        return tuple(self.faults[rank] for rank in sorted(self.faults))


def initial_job(config: JobConfig) -> Job:
    view = initial_view(config.nodes, config.ranks_per_node)
    budget = config.max_restarts if config.max_restarts > 0 else UNLIMITED_RESTARTS
    return Job(view, RankSet(view.ranks), restarts_left=budget)


# The states


@dataclass(frozen=True, slots=True)
class Gathering:
    """The nodes join; or a restarted manager learns what is true."""

    job: Job
    deadline: float
    rebuilding: bool = False
    """Ranks ran before this life of the manager did: it decides nothing before it knows all."""
    awaited: Rank = FIRST_RANK
    """All below it have been heard."""
    deferred: tuple[Signal, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    job: Job
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Suspecting:
    """A collective has failed. If somebody died, we are about to hear."""

    job: Job
    silent: RankSet
    """Who has not said yet that it lost one, too."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Reported:
    """clusterd knows the fault; its order to stop is awaited."""

    job: Job
    since: float
    deadline: float


@dataclass(frozen=True, slots=True)
class Stopping:
    job: Job
    running: RankSet
    order: Signal
    """What is carried out once everybody stands: a plain stop is only reported."""
    deadline: float
    limit: float = inf
    """When the last one counts as stuck; `deadline` may be earlier, for nodes without a link."""


@dataclass(frozen=True, slots=True)
class Deciding:
    """Everybody stands; clusterd decides."""

    job: Job
    deadline: float


@dataclass(frozen=True, slots=True)
class Paused:
    """Everybody stands, because an operation wants it so."""

    job: Job
    deadline: float


@dataclass(frozen=True, slots=True)
class Awaiting:
    """The strategy needs a node that is not there yet."""

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
    """A rank could not be repaired; the deadline waits for the death that explains it."""


@dataclass(frozen=True, slots=True)
class Resuming:
    """Everybody is repaired; the first step is under way."""

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
    """The agents have been told to end; they may take their time to leave."""

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
    """One reaction after another, told as one."""
    because = "; ".join(filter(None, (before.because, after.because)))
    return Outcome(after.state, before.commands + after.commands, because)


def with_job(state: State, **facts: object) -> State:
    """The same state, with these facts of its job changed."""
    return replace(state, job=replace(state.job, **facts))  # type: ignore[arg-type]


# The record of an incident


def add_faults(job: Job, faults: tuple[Fault, ...], now: float) -> Job:
    """New faults: they belong to the incident that is open, until clusterd opens the next."""
    if any(fault.kind == SECONDARY for fault in job.faults.values()):
        # A link has two ends, and a broken collective many: one of them stands for all.
        faults = tuple(fault for fault in faults if fault.kind != SECONDARY)
        if not faults:
            return job
    known = {**job.faults, **{fault.rank: fault for fault in faults}}
    record = job.open_incident
    if any(not fault.kind.retryable for fault in known.values()):
        # Somebody has failed for good: the collectives that others lost to it are no faults.
        known = {r: fault for r, fault in known.items() if fault.kind != SECONDARY}
        faults = tuple(fault for fault in faults if fault.kind != SECONDARY)
        if record is not None:
            record = replace(record, faults=tuple(f for f in record.faults if f.kind != SECONDARY))
    if record is None:
        record = IncidentRecord(
            NO_INCIDENT, faults, (("seen", min(fault.seen_at for fault in faults)),)
        )
    else:
        record = replace(record, faults=(*record.faults, *faults))
    return replace(job, faults=known, open_incident=record)


def mark_phase(job: Job, name: str, at: float) -> Job:
    if job.open_incident is None or any(
        name == marked for marked, _ in job.open_incident.timestamps
    ):
        return job
    return replace(
        job,
        open_incident=replace(
            job.open_incident, timestamps=(*job.open_incident.timestamps, (name, at))
        ),
    )


def start_incident(job: Job, incident: Incident, uuid: str, now: float) -> Job:
    """clusterd has given the incident its number. An older one, still open, is superseded."""
    record = job.open_incident
    if record is not None and record.incident not in (NO_INCIDENT, incident):
        job = close_incident(job, "superseded", f"incident {incident} followed")
        record = None
    if record is None:
        faults = job.known_faults()
        began = max((fault.seen_at for fault in faults), default=now)
        record = IncidentRecord(incident, faults, (("seen", began),))
    record = replace(record, incident=incident)
    return replace(
        job, incident=incident, uuid=uuid, parked=RankTable(), plan_sent=False, open_incident=record
    )


def close_incident(job: Job, outcome: str, because: str) -> Job:
    if job.open_incident is None:
        return job
    done = replace(job.open_incident, outcome=outcome, because=because)
    return replace(
        job, open_incident=None, past_incidents=(*job.past_incidents, done)[-RECORDS_KEPT:]
    )
