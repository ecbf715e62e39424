"""The real state of a simulated job: its pods, processes and devices.

Nothing in the simulation may look here except the actors of the truth (the client at the ranks that
it runs, the scheduler at its pods) and the checks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from taskd.model.clusterd import Pod
from taskd.model.faults import SeenFault
from taskd.model.ids import NodeRank, Rank

TRAINING, STANDING, ERRING, DEAD, AWAY = "training", "standing", "erring", "dead", "away"
"""AWAY: the job continues without this rank."""


@dataclass
class Truth:
    sizes: tuple[int, ...]
    """How many ranks each node has: nodes may have different sizes."""
    ranks: dict[Rank, str] = field(default_factory=dict)
    pods: dict[NodeRank, Pod] = field(default_factory=dict)
    backups: dict[NodeRank, Pod] = field(default_factory=dict)
    devices: dict[str, SeenFault] = field(default_factory=dict)
    """The device faults of each pod, by its uid."""
    reported: set[Rank] = field(default_factory=set)
    """The ranks whose fault clusterd knows and must remember until they train again."""
    phase: str = "Running"
    ended: bool = False
    generation: int = 0

    def __post_init__(self) -> None:
        self.homes: dict[NodeRank, tuple[Rank, ...]] = {}
        first = 0
        for node, size in enumerate(self.sizes):
            self.homes[NodeRank(node)] = tuple(Rank(r) for r in range(first, first + size))
            first += size
        self.start()

    def start(self) -> None:
        """All pods and processes are new."""
        self.ranks = {rank: TRAINING for ranks in self.homes.values() for rank in ranks}
        self.reported.clear()
        self.backups.clear()
        for node in self.homes:
            self.place(node)
        self.phase = "Running"

    def place(self, node: NodeRank, backup: bool = False) -> Pod:
        """A new pod on other devices: the faults of the old devices do not apply."""
        self.generation += 1
        uid = f"pod-{node}-{self.generation}"
        ranks = self.homes[node]
        devices = tuple(str(i) for i in range(len(ranks)))
        pod = Pod(node, uid, uid, f"host-{self.generation}", ranks, devices, backup=backup)
        if backup:
            self.backups[node] = pod
        else:
            if old := self.pods.get(node):
                self.devices.pop(old.uid, None)
            self.pods[node] = pod
        return pod

    def remove(self, node: NodeRank) -> None:
        pod = self.pods.pop(node, None)
        if pod is not None:
            self.devices.pop(pod.uid, None)
        for rank in self.homes[node]:
            self.kill(rank)

    def kill(self, rank: Rank) -> None:
        if self.ranks[rank] is not AWAY:
            self.ranks[rank] = DEAD

    def node_of(self, rank: Rank) -> NodeRank:
        return next(node for node, ranks in self.homes.items() if rank in ranks)

    def all_of(self, *statuses: str) -> list[Rank]:
        return [rank for rank, status in self.ranks.items() if status in statuses]

    def move(self, to: str, *statuses: str) -> None:
        for rank in self.all_of(*statuses):
            self.ranks[rank] = to
            if to == TRAINING:
                self.reported.discard(rank)

    def device_of(self, rank: Rank) -> SeenFault | None:
        pod = self.pods.get(self.node_of(rank))
        return None if pod is None else self.devices.get(pod.uid)
