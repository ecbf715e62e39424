"""What a training process can learn about itself, and what it can be made to do.

Events and commands of `core/worker/machine.py`. The manager's orders (Park, Repair, Dump, Leave of
`model/messages.py`) are events too, as they come.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.ids import Incarnation, Incident, NodeRank, Rank, Step
from taskd.model.messages import Body, Copy, Dump, Leave, Park, Repair
from taskd.model.types import Tick


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is, for life, except the part of the state that it holds."""

    rank: Rank
    node: NodeRank
    incarnation: Incarnation
    pid: int
    shard: str = ""
    replica: int = -1
    without: tuple[Rank, ...] = ()
    """Ranks that were missing when it was last repaired."""


# Events


@dataclass(frozen=True, slots=True)
class ManagerConnected:
    """The bus is open, for the first time or again; `step` is where training stands."""

    step: Step


@dataclass(frozen=True, slots=True)
class ShardKnown:
    """Now it is known which part of the state this rank holds."""

    shard: str
    replica: int
    step: Step


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step in flight cannot be finished."""

    kind: str
    evidence: str


@dataclass(frozen=True, slots=True)
class ThreadParked:
    """The training thread stands still between two steps and waits for an order."""

    step: Step
    whole: bool
    undo: bool = False
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True, slots=True)
class CopiesChanged:
    """What lies in the node's memory now. It changes while this rank stands: others still copy."""

    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class LocalRepairDone:
    """The order to repair has been carried out."""

    incident: Incident
    step: Step
    groups_s: float = 0.0
    state_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LocalRepairFailed:
    """It could not be."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class FirstStepCommitted:
    """The first step since the repair is committed."""

    step: Step


@dataclass(frozen=True, slots=True)
class DumpFinished:
    """The checkpoint is written; or it is not, and why."""

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
    """Free the training thread from the collective that it may be waiting in."""

    incident: Incident
    because: str


@dataclass(frozen=True, slots=True)
class SendToManager:
    """Tell the manager."""

    body: Body


@dataclass(frozen=True, slots=True)
class ExecuteOrder:
    """Hand the order to the training thread."""

    order: Order


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No order came in time: the training thread raises what had happened to it."""

    because: str


Command = AbortCollectives | SendToManager | ExecuteOrder | GiveUp
