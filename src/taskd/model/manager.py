"""What the manager's machine is told, what it asks for, and the story it keeps of each incident.

`core/manager` decides, `manager/sense.py` makes the events, `manager/act.py` carries out the
commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model.clusterd import Signal
from taskd.model.ids import Incident, NodeRank, Position, Rank, Step
from taskd.model.messages import Body
from taskd.model.types import Tick

NO_INCIDENT = Incident(0)

RETRYABLE = {"corrupt": "0", "exception": "0", "communication": "2"}
"""Faults that leave the process alive and usable, and their types on the wire."""


@dataclass(frozen=True, slots=True)
class RankFault:
    rank: Rank
    kind: str
    """exited, silent, hung, stuck, lost, named, unmended; or corrupt, exception, communication"""
    evidence: str
    seen_at: float

    @property
    def type(self) -> str:
        return RETRYABLE.get(self.kind, "1")


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
class NodeSilent:
    node: NodeRank
    evidence: str


@dataclass(frozen=True, slots=True)
class NodeGone:
    """Its agent has ended, which is certain; and workers do not outlive their agent."""

    node: NodeRank
    evidence: str


@dataclass(frozen=True, slots=True)
class RankHung:
    rank: Rank
    evidence: str


@dataclass(frozen=True, slots=True)
class NodesMarkedBad:
    """A stress test has found these nodes at fault: no rank is to be seated there again."""

    nodes: frozenset[NodeRank]
    evidence: str


@dataclass(frozen=True, slots=True)
class SignalReceived:
    signal: Signal


@dataclass(frozen=True, slots=True)
class Subscribed:
    """clusterd listens (again): what it may have missed is said once more."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator wants the job to end."""

    exit_code: int
    because: str


Event = (
    MessageReceived
    | NodeConnected
    | NodeDisconnected
    | NodeSilent
    | NodeGone
    | RankHung
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
class ReportFaults:
    faults: tuple[RankFault, ...]


@dataclass(frozen=True, slots=True)
class ReportStopped:
    uuid: str
    faults: tuple[RankFault, ...]
    code: int = 0
    info: str = ""


@dataclass(frozen=True, slots=True)
class ReportStrategies:
    uuid: str
    faults: tuple[RankFault, ...]
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportResult:
    uuid: str
    code: int
    info: str
    strategy: str
    isolated: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing is left to do: the manager may end with this code."""

    exit_code: int
    because: str


Command = SendMessage | ReportFaults | ReportStopped | ReportStrategies | ReportResult | Finish
Report = ReportFaults | ReportStopped | ReportStrategies | ReportResult


# The story


@dataclass(frozen=True, slots=True)
class IncidentRecord:
    """One incident: its faults, its moments in seconds of the manager's clock, its end."""

    incident: Incident
    faults: tuple[RankFault, ...]
    moments: tuple[tuple[str, float], ...]
    """seen, stopped, decided, forked, groups, state, step: each when it was complete."""
    strategy: str = ""
    outcome: str = ""
    because: str = ""
    written: Step | None = None
    """The step that its survivors have left in a checkpoint."""

    def parts_ms(self) -> dict[str, float]:
        """How long each part took, in the order in which they ended."""
        parts: dict[str, float] = {}
        for (_, before), (name, at) in zip(self.moments, self.moments[1:], strict=False):
            parts[name] = (at - before) * 1000.0
        return parts
