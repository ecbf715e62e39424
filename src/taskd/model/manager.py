"""Events and commands of the manager's state machine, and its record of each incident.

`core/manager` decides, `manager/sense.py` produces the events, `manager/act.py` carries out the
commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.clusterd import Report, Signal
from taskd.model.faults import Fault
from taskd.model.ids import Incarnation, Incident, NodeRank, Position, Rank, Step
from taskd.model.messages import Body
from taskd.model.strategies import Strategy, WireStrategy
from taskd.model.types import Tick

NO_INCIDENT = Incident(0)

# Events


@dataclass(frozen=True, slots=True)
class MessageReceived:
    src: Position
    body: Body


@dataclass(frozen=True, slots=True)
class NodeConnected:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    node: NodeRank


@dataclass(frozen=True, slots=True)
class NodesRegistered:
    """The nodes that the job has had so far, as a new leader finds them. Each of them says hello,
    or is reported as gone or silent."""

    nodes: frozenset[NodeRank]
    epoch: int


@dataclass(frozen=True, slots=True)
class NodeSilent:
    node: NodeRank
    evidence: str


@dataclass(frozen=True, slots=True)
class NodeBack:
    """A node that was reported silent sends heartbeats again, over the connection it had before."""

    node: NodeRank


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The node's agent has ended for certain. Its workers end together with it."""

    node: NodeRank
    evidence: str


@dataclass(frozen=True, slots=True)
class RankHung:
    rank: Rank
    incarnation: Incarnation
    evidence: str
    stopped: bool = False
    """Its process is stopped by a signal: it is hung in every state of the job."""


@dataclass(frozen=True, slots=True)
class JobStalled:
    """All ranks wait for each other."""

    behind: tuple[tuple[Rank, Incarnation], ...]
    """The ranks that have entered fewer collectives than most; empty: no rank stands out."""
    evidence: str


@dataclass(frozen=True, slots=True)
class NodesMarkedBad:
    """These nodes have a broken device: no rank may be placed there again."""

    nodes: frozenset[NodeRank]
    evidence: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    signal: Signal


@dataclass(frozen=True, slots=True)
class Subscribed:
    """The stream of clusterd's signals is open (again): reports it may have missed are repeated."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """An operator or an agent requests the end of the job."""

    exit_code: int
    because: str


Event = (
    MessageReceived
    | NodeConnected
    | NodeDisconnected
    | NodesRegistered
    | NodeSilent
    | NodeBack
    | NodeGone
    | RankHung
    | JobStalled
    | NodesMarkedBad
    | SignalReceived
    | Subscribed
    | StopRequested
    | Tick
)


# Commands


@dataclass(frozen=True, slots=True)
class SendMessage:
    to: Position
    body: Body


@dataclass(frozen=True, slots=True)
class Finish:
    """The job has ended: the manager exits with this code."""

    exit_code: int
    because: str


Command = SendMessage | Report | Finish


# Incidents


@dataclass(frozen=True, slots=True)
class IncidentRecord:
    """One incident: its faults, when each phase was complete (manager's clock), its outcome."""

    incident: Incident
    faults: tuple[Fault, ...]
    timestamps: tuple[tuple[str, float], ...]
    """Phase and completion time: seen, stopped, decided, forked, groups, state, step."""
    strategy: Strategy | WireStrategy | str = ""
    outcome: str = ""
    because: str = ""
    dumped_step: Step | None = None
    """The step that the surviving ranks have saved in an emergency checkpoint."""

    def phases_ms(self) -> dict[str, float]:
        """How long each phase took, in the order of completion."""
        parts: dict[str, float] = {}
        for (_, before), (name, at) in zip(self.timestamps, self.timestamps[1:], strict=False):
            parts[name] = (at - before) * 1000.0
        return parts
