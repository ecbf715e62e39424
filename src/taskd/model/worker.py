"""Events and commands of the worker's state machine, `core/worker/machine.py`.

The manager's orders (Park, Repair, Dump, Leave of `model/messages.py`) are events, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.faults import FaultCause
from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.messages import FIRST_STEP, NO_TURN, Body, Copy, Dump, Leave, Park, Repair
from taskd.model.types import Tick


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process this is. Fixed, except for its shard and the ranks that are missing."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    pid: int
    shard: str = ""
    replica: int = -1
    without: tuple[Rank, ...] = ()
    """Ranks that did not take part in the last repair."""
    own_since: int = -1
    """From this step on it also has state that no other rank has. -1: it has none."""


# Events


@dataclass(frozen=True, slots=True)
class ManagerConnected:
    """The bus connection is open (again), or the manager requests a hello; `step` is committed."""

    step: Step


@dataclass(frozen=True, slots=True)
class ShardKnown:
    """It is now known which part of the state this rank holds."""

    shard: str
    replica: int
    step: Step
    own_since: int = -1


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The current step cannot be finished."""

    kind: FaultCause
    evidence: str


@dataclass(frozen=True, slots=True)
class ThreadParked:
    """The training thread is parked between two steps and waits for an order."""

    step: Step
    whole: bool
    undo: bool = False
    copies: tuple[Copy, ...] = ()
    earliest: Step = FIRST_STEP
    """The script cannot go back before this step."""
    turn: Step = NO_TURN
    sections: int = 0
    outside: str = ""


@dataclass(frozen=True, slots=True)
class CopiesChanged:
    """The snapshots in the node's memory now. They change while this rank is parked: others still
    copy."""

    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class LocalRepairDone:
    """This rank has carried out its Repair order."""

    incident: Incident
    step: Step
    groups_s: float = 0.0
    state_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalRepairFailed:
    """This rank could not carry out its Repair order."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class FirstStepCommitted:
    """The first step after the repair is committed."""

    step: Step


@dataclass(frozen=True, slots=True)
class DumpFinished:
    """The emergency checkpoint is written, or `because` says why it is not."""

    incident: Incident
    step: Step
    because: str = ""


Order = Repair | Dump | Leave
ThreadEvent = (
    ManagerConnected
    | ShardKnown
    | StepFailed
    | ThreadParked
    | CopiesChanged
    | LocalRepairDone
    | LocalRepairFailed
    | FirstStepCommitted
    | DumpFinished
)
Event = ThreadEvent | Tick | Park | Order

# Commands


@dataclass(frozen=True, slots=True)
class AbortCollectives:
    """Abort the collectives, so that the training thread does not wait in one."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class SendToManager:
    body: Body


@dataclass(frozen=True, slots=True)
class ExecuteOrder:
    """Pass the order to the training thread."""

    order: Order


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No order came in time: the training thread raises the error of its failed step."""

    because: str


Command = AbortCollectives | SendToManager | ExecuteOrder | GiveUp
