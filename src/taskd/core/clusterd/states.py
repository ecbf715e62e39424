"""The states of one job's recovery. Each carries exactly what is valid in it, and a deadline.

A state that waits for the client's answer holds its `order`: the signal that is sent again on
every new subscription until the answer arrives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from taskd.core.clusterd.job_facts import Job, Round
from taskd.model import types
from taskd.model.clusterd import Command, Operation, Pod, Signal
from taskd.model.codes import RecoverCode
from taskd.model.ids import Incident, JobId, Rank
from taskd.model.strategies import Strategy

# At rest


@dataclass(frozen=True, slots=True)
class Idle:
    """The job trains, as far as is known."""

    job: Job
    again_at: float | None = None
    """When to check again for unhandled faults and for the label that must be reset."""
    quiet: bool = False
    """Ignore what the cluster sees until then: the job has just been ended."""

    @property
    def deadline(self) -> float:
        return inf if self.again_at is None else self.again_at


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The job trains without the ranks of the round, and grows back when they return."""

    job: Job
    round: Round
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Ended:
    """The job was ordered to stop for good. `order` is kept until it is delivered."""

    job: Job
    order: Signal | None
    cause: RecoverCode
    deadline: float = inf


# A round


@dataclass(frozen=True, slots=True)
class PreExiting:
    """The processes on a broken device are ordered to exit; then the round begins."""

    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class PlatformChoosing:
    job: Job
    round: Round
    deadline: float


@dataclass(frozen=True, slots=True)
class Stopping:
    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class Settling:
    """All ranks are parked. Wait for the cluster: all faults seen, resources released, healed."""

    job: Job
    round: Round
    not_before: float
    deadline: float


@dataclass(frozen=True, slots=True)
class PlatformConfirming:
    job: Job
    round: Round
    deadline: float


@dataclass(frozen=True, slots=True)
class Negotiating:
    """The job was sent all faults and is asked which strategies it can follow."""

    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class AwaitingPods:
    """Before the job shrinks: the scheduler may still find new pods in time."""

    job: Job
    round: Round
    deadline: float


@dataclass(frozen=True, slots=True)
class PlatformRanking:
    """`recover` is chosen; the platform has yet to write the new rank table."""

    job: Job
    round: Round
    strategy: Strategy
    deadline: float


@dataclass(frozen=True, slots=True)
class Converging:
    """`retry` is chosen; the network has yet to find new routes."""

    job: Job
    round: Round
    deadline: float


@dataclass(frozen=True, slots=True)
class Retrying:
    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class Replacing:
    """`recover` or `recover-in-place`: lost processes come back, here or elsewhere."""

    job: Job
    round: Round
    strategy: Strategy
    order: Signal
    report_by: float
    pods_by: float | None
    """When the scheduler must have replaced the pods; None: no pod has to be replaced."""
    clear_at: float | None = None

    @property
    def deadline(self) -> float:
        return min(t for t in (self.report_by, self.pods_by, self.clear_at) if t is not None)


@dataclass(frozen=True, slots=True)
class Shrinking:
    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class Growing:
    job: Job
    round: Round
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class Dumping:
    job: Job
    round: Round
    order: Signal
    deadline: float


# Giving up


@dataclass(frozen=True, slots=True)
class Exiting:
    """The job was ordered to exit; the scheduler may already be replacing the lost pods."""

    job: Job
    round: Round
    order: Signal | None
    """None once it is delivered."""
    cause: RecoverCode
    deadline: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """The PodGroup is labelled `pause`: the scheduler restarts the job, and we only watch."""

    job: Job
    round: Round
    order: Signal | None
    """To exit, or to end the first pod; None once it is delivered."""
    cause: RecoverCode
    left_running: bool
    deadline: float


@dataclass(frozen=True, slots=True)
class Killing:
    """The last resort: the client is ordered to end the first pod, so that the job restarts."""

    job: Job
    round: Round
    order: Signal
    cause: RecoverCode
    deadline: float


# Hot switch


@dataclass(frozen=True, slots=True)
class AwaitingBackup:
    job: Job
    round: Round
    pod: Pod
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class AwaitingPause:
    """The backup pod runs; the job is asked whether it can move there."""

    job: Job
    round: Round
    pod: Pod
    backup: Pod
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class AwaitingRemoval:
    job: Job
    round: Round
    pod: Pod
    backup: Pod
    deadline: float


@dataclass(frozen=True, slots=True)
class Migrating:
    job: Job
    round: Round
    pod: Pod
    backup: Pod
    order: Signal
    deadline: float


# Operations on a healthy job


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the operator has asked for."""

    operation: Operation
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...] = ()
    ops: Mapping[Rank, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pausing:
    job: Job
    round: Round
    task: Task
    order: Signal
    deadline: float


@dataclass(frozen=True, slots=True)
class SwitchingNic:
    job: Job
    round: Round
    task: Task
    deadline: float


@dataclass(frozen=True, slots=True)
class StressTesting:
    job: Job
    round: Round
    task: Task
    hit: bool
    """The job has reported a fault in the meantime: the test counts as failed."""
    deadline: float


@dataclass(frozen=True, slots=True)
class Resuming:
    job: Job
    round: Round
    task: Task
    text: str
    """The reply to the operator once the job trains again."""
    order: Signal
    deadline: float


HotSwitch = AwaitingBackup | AwaitingPause | AwaitingRemoval | Migrating
Operating = Pausing | SwitchingNic | StressTesting | Resuming
GivingUp = Exiting | HandedOver | Killing | Ended
Undecided = (
    PreExiting
    | PlatformChoosing
    | Stopping
    | Settling
    | PlatformConfirming
    | Negotiating
    | AwaitingPods
    | PlatformRanking
    | Converging
)
"""In a round, before a strategy is ordered: a new fault of a known rank changes nothing."""
Repairing = Retrying | Replacing | Shrinking | Growing | Dumping
InTrouble = Undecided | Repairing | Shrunk | HotSwitch | Operating
State = Idle | InTrouble | GivingUp
Asking = (
    PreExiting
    | Stopping
    | Negotiating
    | Retrying
    | Replacing
    | Shrinking
    | Growing
    | Dumping
    | GivingUp
    | AwaitingBackup
    | AwaitingPause
    | Migrating
    | Pausing
    | Resuming
)
"""The states that hold an order which the client may not have received or answered yet."""

NEW = Idle(Job(id=JobId(""), incident=Incident(0)))
"""The state before a job is registered."""


Outcome = types.Outcome[State, Command]
