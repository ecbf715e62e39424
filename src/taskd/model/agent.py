"""What happens to one node's training processes, and what can be done about it.

`core/agent` decides with these words; the agent's sense and act speak them to the world.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model import messages as m
from taskd.model.ids import Incarnation, Incident, Rank
from taskd.model.types import Tick

# What one rank is doing


@dataclass(frozen=True, slots=True)
class Starting:
    """A process has been asked for."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Running:
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class Dying:
    """It has been killed, and its death is not confirmed yet."""

    incarnation: Incarnation
    pid: int | None
    """None while the process has been asked for but is not there yet."""


@dataclass(frozen=True, slots=True)
class Ended:
    exited: m.WorkerExited


Worker = Starting | Running | Dying | Ended


# Events, besides the manager's messages


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    rank: Rank
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStartFailed:
    rank: Rank
    incarnation: Incarnation
    because: str


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Somebody wants the node to stop; the second time, at once."""

    because: str
    signal: int


@dataclass(frozen=True, slots=True)
class ManagerConnected:
    """The manager can hear us, perhaps a new one that knows nothing."""


@dataclass(frozen=True, slots=True)
class ManagerDisconnected:
    """The manager cannot hear us."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """From now on a worker could be started at once."""


Order = (
    m.StartWorkers
    | m.ReplaceWorkers
    | m.RestartJob
    | m.RestartAgent
    | m.RestartWorkers
    | m.StopWorkers
    | m.ExitAgent
    | m.EndJob
    | m.NodeMarkedBad
)
Event = (
    WorkerStarted
    | WorkerStartFailed
    | m.WorkerExited
    | Interrupted
    | ManagerConnected
    | ManagerDisconnected
    | WarmedUp
    | Tick
    | Order
)


# Commands


@dataclass(frozen=True, slots=True)
class StartWorker:
    rank: Rank
    incarnation: Incarnation
    attempt: int
    incident: Incident


@dataclass(frozen=True, slots=True)
class KillWorker:
    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Pass on the signal that asks a process to end."""

    rank: Rank
    incarnation: Incarnation
    signal: int


@dataclass(frozen=True, slots=True)
class PrepareStandby:
    """Have a process ready for the next rank that has to be started, once there is time for it."""


@dataclass(frozen=True, slots=True)
class RenewStore:
    """The old attempt's keys must not be seen by the new one."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SendToManager:
    """To the manager."""

    body: m.Body


@dataclass(frozen=True, slots=True)
class SendHello:
    """Tell the manager who lives here; the edge adds the addresses."""

    workers: tuple[m.LocalWorker, ...]
    attempt: int
    remaining: int
    condemned: str = ""


Command = (
    StartWorker
    | KillWorker
    | SignalWorker
    | PrepareStandby
    | RenewStore
    | SendToManager
    | SendHello
)
