"""The states of the worker's machine, and the transitions between them that are allowed.

    Joining --------------------------+
       |                              v
       +--> Parked --> Repairing --> Resumed --> Training
              ^  ^        |             |           |
              |  |        v             v           |
              |  +---- Faulted <--------+-----------+
              |           v             |           |
              +-------- Parking <-------+-----------+

and from every state to Leaving. `machine.py` decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from taskd.model import messages as m
from taskd.model import types
from taskd.model.ids import Incident
from taskd.model.worker import Command, Identity, LocalRepairDone, ThreadParked


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    answer_timeout_s: float = 900.0
    """How long a rank that reported a fault of its own waits for the order to park: as long as the
    manager waits for clusterd, and longer than nodes wait for etcd or for a manager."""

    nudge_s: float = 1.0
    """How often the groups are aborted again while the training thread has not parked."""

    order_timeout_s: float = 900.0
    """How long a parked rank waits for an order before it gives up."""

    dump_timeout_s: float = 600.0
    """How long writing the emergency checkpoint may take."""

    def __post_init__(self) -> None:
        for name in ("answer_timeout_s", "nudge_s", "order_timeout_s", "dump_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Joining:
    """A new process before its first step. It has no state yet, but may have its plan."""

    identity: Identity
    incident: Incident
    plan: m.Repair | None = None
    copies: tuple[m.Copy, ...] = ()
    """The snapshots on its node, perhaps of its own former incarnation."""
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Training:
    identity: Identity
    incident: Incident
    proof: m.Committed | None = None
    """The step that ended the last incident; repeated in case the manager missed it."""
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Faulted:
    """It has reported a fault of its own and waits for the incident that follows."""

    identity: Identity
    incident: Incident
    report: m.WorkerFailed | m.RepairFailed
    at: ThreadParked | None
    deadline: float


@dataclass(frozen=True, slots=True)
class Parking:
    """It must park; the training thread is leaving its step."""

    identity: Identity
    incident: Incident
    deadline: float


@dataclass(frozen=True, slots=True)
class Parked:
    identity: Identity
    incident: Incident
    at: ThreadParked
    deadline: float


@dataclass(frozen=True, slots=True)
class Repairing:
    identity: Identity
    incident: Incident
    plan: m.Repair
    deadline: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """It is repaired, but has not committed a step yet."""

    identity: Identity
    incident: Incident
    repair: LocalRepairDone
    deadline: float = inf


@dataclass(frozen=True, slots=True)
class Dumping:
    identity: Identity
    incident: Incident
    deadline: float


@dataclass(frozen=True, slots=True)
class Leaving:
    identity: Identity
    incident: Incident
    report: m.Dumped | None = None
    deadline: float = inf


State = Joining | Training | Faulted | Parking | Parked | Repairing | Resumed | Dumping | Leaving

LEGAL: dict[type[State], set[type[State]]] = {
    Joining: {Joining, Parked, Repairing, Leaving},
    Training: {Training, Faulted, Parking, Leaving},
    Faulted: {Faulted, Parking, Parked, Leaving},
    Parking: {Parking, Parked, Leaving},
    Parked: {Parked, Repairing, Dumping, Leaving},
    Repairing: {Parking, Faulted, Resumed, Leaving},
    Resumed: {Training, Faulted, Parking, Leaving},
    Dumping: {Leaving},
    Leaving: set(),
}


Outcome = types.Outcome[State, Command]
