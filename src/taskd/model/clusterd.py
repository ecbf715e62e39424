"""Events and commands of clusterd's machine of one job.

Events come from the job's client (reports, streams), from the operator, from the cluster (always
complete views, so that a missed one does no harm) and from the clock. Commands go to the job's
streams, to the operator and to the cluster. `core/clusterd` decides; `clusterd/` does the I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from taskd.model.faults import Fault, SeenFault
from taskd.model.ids import Incident, JobId, NodeRank, Rank
from taskd.model.operations import NicResult, StressResult
from taskd.model.strategies import Strategy, WireStrategy
from taskd.model.types import Tick

# Facts about a job


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """The job's recovery settings, from its PodGroup or, without a cluster, from its manager."""

    strategies: tuple[Strategy, ...] = (Strategy.EXIT,)
    cluster: bool = False
    """The job has a scheduler, which replaces pods and reads our labels."""
    platform: bool = False
    """An AI platform names the strategy and confirms the faults."""
    sub_health: str = "ignore"
    """ignore, graceExit, hotSwitch"""
    framework: str = "pytorch"
    rescheduling: bool = False
    """The scheduler may replace single pods or the whole job by itself."""
    super_pod: bool = False
    """Healthy nodes hold resources of a lost node, and release them on request."""
    reschedule_timeout_s: float | None = None
    resources_timeout_s: float | None = None
    deletes_pods: bool = False
    """No other program deletes pods that must be replaced: clusterd does."""
    no_backup_nic: bool = False
    """The ranks have no second network interface, so their links cannot be switched."""


@dataclass(frozen=True, slots=True, order=True)
class Pod:
    node_rank: NodeRank
    uid: str
    name: str = ""
    node: str = ""
    """Name of the machine."""
    ranks: tuple[Rank, ...] = ()
    """Pods may have different sizes: each lists its ranks."""
    devices: tuple[str, ...] = ()
    """The device of each rank, in the same order; empty until they are assigned."""
    running: bool = True
    finished: bool = False
    """All its ranks have ended with success."""
    backup: bool = False
    """Created by a hot switch, not yet a member of the job."""


# Events


@dataclass(frozen=True, slots=True)
class JobRegistered:
    job: JobId
    config: JobConfig
    seed: str
    """Random; makes the job's uuids unique."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class JobDeleted:
    """The job is over: its manager has said so, or the cluster no longer knows it."""

    because: str = "the cluster has deleted the job"


@dataclass(frozen=True, slots=True)
class FaultsSeen:
    """All faults of the job that the cluster sees now; empty if the job is healthy."""

    faults: tuple[SeenFault, ...]


@dataclass(frozen=True, slots=True)
class PodsSeen:
    """All pods of the job that the cluster has now."""

    pods: tuple[Pod, ...]
    phase: str = "Running"
    """Phase of the PodGroup."""


@dataclass(frozen=True, slots=True)
class PlatformSeen:
    """The platform's annotations now; None: the key is absent."""

    strategy: str | None = None
    confirm: str | None = None
    result: str | None = None
    rank_table: str | None = None


# Reports of the job. The manager sends them as commands, clusterd receives them as events.


@dataclass(frozen=True, slots=True)
class FaultReport:
    """All faults that the sender knows: the job itself, or an operator."""

    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class StopReport:
    """The answer to the order to stop or pause all ranks."""

    code: int
    uuid: str = ""
    info: str = ""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class StrategiesReport:
    """What the job can do: the answer to a global fault, or an offer to grow back."""

    strategies: tuple[WireStrategy | str, ...]
    uuid: str = ""
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class ResultReport:
    """How an ordered strategy went."""

    code: int
    strategy: WireStrategy | str
    isolated: tuple[Rank, ...] = ()
    uuid: str = ""
    info: str = ""


ExpectedReport = StopReport | StrategiesReport | ResultReport
"""Answers to an order. clusterd accepts each only in the state that waits for it."""
Report = FaultReport | ExpectedReport


class Stream(StrEnum):
    SIGNALS = "signals"
    NIC = "nic"
    STRESS = "stress"


@dataclass(frozen=True, slots=True)
class Subscribed:
    stream: Stream = Stream.SIGNALS


@dataclass(frozen=True, slots=True)
class Unsubscribed:
    stream: Stream = Stream.SIGNALS


@dataclass(frozen=True, slots=True)
class SignalDelivered:
    sequence: int


@dataclass(frozen=True, slots=True)
class SignalFailed:
    sequence: int


@dataclass(frozen=True, slots=True)
class OperatorAskedNic:
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class OperatorAskedStress:
    ops: Mapping[Rank, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ClusterWriteDone:
    sequence: int


@dataclass(frozen=True, slots=True)
class ClusterWriteFailed:
    sequence: int
    because: str


Event = (
    JobRegistered
    | JobDeleted
    | FaultReport
    | FaultsSeen
    | PodsSeen
    | PlatformSeen
    | StopReport
    | StrategiesReport
    | ResultReport
    | Subscribed
    | Unsubscribed
    | SignalDelivered
    | SignalFailed
    | OperatorAskedNic
    | OperatorAskedStress
    | NicResult
    | StressResult
    | ClusterWriteDone
    | ClusterWriteFailed
    | Tick
)


# Commands. `sequence` numbers the commands of one job; only `step` assigns it.


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal:
    """To the job's client. Kept, and sent again on every subscription, until it is answered."""

    uuid: str
    incident: Incident
    type: str
    actions: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    strategy: WireStrategy | str = ""
    timeout_s: int = 0
    nodes: tuple[NodeRank, ...] = ()
    extra: str = ""
    because: str = ""
    """Why the job must end; empty in other orders."""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class SendSwitchRanks:
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class SendStressRanks:
    ops: Mapping[Rank, tuple[int, ...]]
    sequence: int = 0


class Operation(StrEnum):
    NIC = "switch nic"
    STRESS = "stress test"


@dataclass(frozen=True, slots=True)
class ReplyOperator:
    operation: Operation
    text: str


class ResetOperation(StrEnum):
    FLUSHING = "notifyFaultFlushing"
    FAULT = "fault"
    RESTART_ALL = "restartAllProcess"
    CLEAR = "clear"


@dataclass(frozen=True, slots=True)
class WriteResetConfig:
    """For agents that read reset-config. A failed write never stops a round."""

    operation: ResetOperation
    ranks: tuple[Rank, ...] = ()
    restart_in_place: bool = False
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class LabelPodGroup:
    key: str
    value: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class AnnotatePodGroup:
    key: str
    value: str | None
    """None: remove it."""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class LabelPod:
    pod: str
    """The uid, because a newer pod may have the same name."""
    key: str
    value: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class AnnotatePod:
    pod: str
    key: str
    value: str | None
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class DeletePod:
    """So that the cluster creates another one. A newer pod of the same name stays."""

    pod: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class AnnotateNode:
    node: str
    key: str
    value: str
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class WriteFaultJobInfo:
    """Makes the healthy nodes of a super pod release the resources of the lost ones."""

    nodes: tuple[str, ...]
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class RemoveFaultJobInfo:
    sequence: int = 0


ClusterCommand = (
    WriteResetConfig
    | LabelPodGroup
    | AnnotatePodGroup
    | LabelPod
    | AnnotatePod
    | DeletePod
    | AnnotateNode
    | WriteFaultJobInfo
    | RemoveFaultJobInfo
)
Command = Signal | SendSwitchRanks | SendStressRanks | ReplyOperator | ClusterCommand
