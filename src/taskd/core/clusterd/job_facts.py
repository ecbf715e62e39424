"""What is known of a job in every state of its recovery, and of the trouble it is in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from taskd.model.clusterd import JobConfig, PlatformSeen, Pod
from taskd.model.faults import Fault, SeenFault
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.strategies import Strategy

MASTER = NodeRank(0)


@dataclass(frozen=True, slots=True)
class Answered:
    """A report that was taken: the same one again is a duplicate, and no mistake."""

    report: str
    uuid: str
    code: int
    strategy: str


@dataclass(frozen=True, slots=True)
class Labelling:
    """The last write of that mark which is under way, as far as is known."""

    sequence: int
    value: str
    since: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: JobId
    incident: Incident
    name: str = ""
    config: JobConfig = field(default_factory=JobConfig)
    seed: str = ""
    sequence: int = 0
    """Counts the commands that need a number."""
    subscribed: bool = False
    pods: tuple[Pod, ...] = ()
    places: Mapping[NodeRank, tuple[Rank, ...]] = field(default_factory=dict)
    """Which ranks belong to which node. Remembered: a pod that has gone shows no ranks."""
    phase: str = ""
    """The PodGroup's, as last seen."""
    platform: PlatformSeen = field(default_factory=PlatformSeen)
    confirm: str = ""
    """What we last wrote for the platform to confirm."""
    seen: tuple[SeenFault, ...] = ()
    """The cluster's last picture of the job's faults."""
    handled: frozenset[tuple[Rank, str]] = frozenset()
    """Of these, the ones (rank, code) that a round has dealt with. They begin no other."""
    answered: tuple[Answered, ...] = ()
    past: tuple[str, ...] = ()
    """The last uuids that have gone out of use."""
    paused: bool = False
    """The PodGroup may still carry our mark `pause`; `on` is owed."""
    labelling: Labelling | None = None
    hot_switch_not_before: float = 0.0
    promoted: frozenset[str] = frozenset()
    """The pods (uid) that were backups, and have taken the place of theirs."""

    @property
    def members(self) -> tuple[Pod, ...]:
        """The backup of a hot switch is a member once the pod that it replaces has gone."""
        taken = {pod.node_rank for pod in self.pods if not pod.backup}
        return tuple(pod for pod in self.pods if not pod.backup or pod.node_rank not in taken)

    @property
    def origin(self) -> tuple[tuple[NodeRank, str], ...]:
        return tuple(sorted((pod.node_rank, pod.uid) for pod in self.members))

    def has(self, rank: Rank) -> bool:
        """With no pods known, every rank that can be is taken for the job's."""
        return rank >= 0 and (not self.places or any(rank in r for r in self.places.values()))

    def is_handled(self, seen: SeenFault) -> bool:
        return (seen.rank, seen.code) in self.handled

    def pod_of(self, rank: Rank) -> Pod | None:
        return next((pod for pod in self.members if rank in pod.ranks), None)

    def pod_at(self, node: NodeRank) -> Pod | None:
        return next((pod for pod in self.members if pod.node_rank == node), None)

    def nodes_of(self, ranks: Iterable[Rank]) -> tuple[NodeRank, ...]:
        wanted = set(ranks)
        return tuple(sorted(node for node, held in self.places.items() if wanted & set(held)))

    def ranks_of(self, nodes: Iterable[NodeRank]) -> tuple[Rank, ...]:
        return tuple(sorted(rank for node in set(nodes) for rank in self.places.get(node, ())))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One strategy of this trouble that did not work out."""

    strategy: Strategy
    code: int
    """What the job reported; negative when a new fault came in between."""

    @property
    def interrupted(self) -> bool:
        return self.code < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    uuid: str
    began: float
    uuid_number: int = 0
    """Counts the uuids of the incident: clients take a second order under one uuid for an echo."""
    faults: tuple[Fault, ...] = ()
    origin: tuple[tuple[NodeRank, str], ...] = ()
    """Which pod (uid) stood where when the trouble began."""
    leaving: frozenset[NodeRank] = frozenset()
    """The nodes whose pods must be replaced; the rest is healed in place."""
    offered: tuple[str, ...] = ()
    """The strategies that the job says it can follow."""
    platform: str = ""
    """The strategy that the platform has named."""
    history: tuple[Attempt, ...] = ()
    """What has been tried since the job last trained, in this incident and those before it."""
    stopped: bool = False
    """The ranks have been told to stand still since the job last trained."""
    nic_failed: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(fault.rank for fault in self.faults)


def new_uuid(job: Job, incident: Incident, number: int, now: float) -> str:
    """As upstream spells it: the time in upper-case hex, a dash, 16 bytes in lower-case hex."""
    salt = sha256(f"{job.seed}/{job.id}/{incident}/{number}".encode()).hexdigest()[:32]
    return f"{int(now * 1e9):X}-{salt}"
