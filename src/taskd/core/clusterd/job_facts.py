"""What is known about a job in every state of its recovery, and about its current round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from taskd.model.clusterd import JobConfig, PlatformSeen, Pod
from taskd.model.faults import Fault, SeenFault
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.strategies import Strategy, WireStrategy

MASTER = NodeRank(0)


@dataclass(frozen=True, slots=True)
class Answered:
    """A report that was accepted: the same report again is a duplicate, not an error."""

    report: str
    uuid: str
    code: int
    strategy: str
    order: str = ""
    """The uuid of the order that it answered: the report itself may carry none."""


@dataclass(frozen=True, slots=True)
class Labelling:
    """The newest write of the recovery label whose result is not known yet."""

    sequence: int
    value: str
    since: float


@dataclass(frozen=True, slots=True)
class Succession:
    """The pod (uid) that was last seen at a node, and the one before it."""

    uid: str
    before: str = ""
    since: float = 0.0
    """When it was first seen there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: JobId
    incident: Incident
    name: str = ""
    config: JobConfig = field(default_factory=JobConfig)
    seed: str = ""
    sequence: int = 0
    """Number of the last command."""
    subscribed: bool = False
    pods: tuple[Pod, ...] = ()
    places: Mapping[NodeRank, tuple[Rank, ...]] = field(default_factory=dict)
    """Which ranks belong to which node. Kept, because a pod that has gone shows no ranks."""
    successions: Mapping[NodeRank, Succession] = field(default_factory=dict)
    phase: str = ""
    """Phase of the PodGroup, as last seen."""
    platform: PlatformSeen = field(default_factory=PlatformSeen)
    confirm: str = ""
    """The faults that we last asked the platform to confirm."""
    seen: tuple[SeenFault, ...] = ()
    """The job's faults as the cluster last reported them."""
    handled: frozenset[tuple[Rank, str]] = frozenset()
    """Of these, the (rank, code) that a round has handled. They do not start another round."""
    answered: tuple[Answered, ...] = ()
    past: tuple[str, ...] = ()
    """The last uuids that are out of use."""
    paused: bool = False
    """The PodGroup may still carry our label `pause`; we must set it to `on` again."""
    labelling: Labelling | None = None
    hot_switch_not_before: float = 0.0
    promoted: frozenset[str] = frozenset()
    """The pods (uid) that were backups and have replaced their pod."""

    @property
    def members(self) -> tuple[Pod, ...]:
        """The backup of a hot switch is a member once the pod that it replaces has gone."""
        taken = {pod.node_rank for pod in self.pods if not pod.backup}
        return tuple(pod for pod in self.pods if not pod.backup or pod.node_rank not in taken)

    @property
    def origin(self) -> tuple[tuple[NodeRank, str], ...]:
        return tuple(sorted((pod.node_rank, pod.uid) for pod in self.members))

    @property
    def from_ascend(self) -> bool:
        """Ascend's MindIO repairs the ranks: no report that comes from it carries a uuid."""
        return bool(self.answered) and not self.answered[-1].uuid

    def has(self, rank: Rank) -> bool:
        """Is this a rank of the job? While no pods are known, every non-negative rank is."""
        return rank >= 0 and (not self.places or any(rank in r for r in self.places.values()))

    def has_finished(self, rank: Rank) -> bool:
        pod = self.pod_of(rank)
        return pod is not None and pod.finished

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
    """A strategy that was tried in this incident and did not work."""

    strategy: Strategy
    code: int
    """What the job reported; negative if a new fault interrupted it."""

    @property
    def interrupted(self) -> bool:
        return self.code < 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    uuid: str
    began: float
    uuid_number: int = 0
    """Number of the uuid: clients take a second order under the same uuid for a duplicate."""
    faults: tuple[Fault, ...] = ()
    origin: tuple[tuple[NodeRank, str], ...] = ()
    """The pod (uid) of each node when the incident began."""
    doubted: frozenset[str] = frozenset()
    """Replacements (uid) whose ranks the job has reported once: perhaps it meant the old pod."""
    leaving: frozenset[NodeRank] = frozenset()
    """The nodes whose pods must be replaced; the other nodes are repaired in place."""
    offered: tuple[str, ...] = ()
    """The strategies that the job has offered."""
    platform: WireStrategy | None = None
    """The strategy that the platform has named, if it has."""
    history: tuple[Attempt, ...] = ()
    """What was tried since the job last trained, in this incident and in earlier ones."""
    stopped: bool = False
    """The ranks have been ordered to park since the job last trained."""
    nic_failed: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(fault.rank for fault in self.faults)


def new_uuid(job: Job, incident: Incident, number: int, now: float) -> str:
    """In upstream's format: the time in upper-case hex, a dash, 16 bytes in lower-case hex."""
    salt = sha256(f"{job.seed}/{job.id}/{incident}/{number}".encode()).hexdigest()[:32]
    return f"{int(now * 1e9):X}-{salt}"
