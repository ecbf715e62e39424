"""Events and commands of the agent's state machine: the training processes of one node.

`core/agent` decides; `agent/sense.py` produces the events, `agent/act.py` carries out the commands.
"""

from __future__ import annotations

from dataclasses import dataclass

from taskd.model import messages as m
from taskd.model.ids import Incarnation, Incident, Rank
from taskd.model.types import Tick

# The state of one rank's process


@dataclass(frozen=True, slots=True)
class Starting:
    """Its start has been ordered."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Running:
    incarnation: Incarnation
    pid: int


@dataclass(frozen=True, slots=True)
class Dying:
    """It has been killed, but its exit is not confirmed yet."""

    incarnation: Incarnation
    pid: int | None
    """None: its start was ordered, but it has not started yet."""


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
    """A signal or the launcher requests the node to stop. The second time: immediately."""

    because: str
    signal: int


@dataclass(frozen=True, slots=True)
class ManagerConnected:
    """The connection to the manager is open. It may be a restarted manager that knows nothing."""


@dataclass(frozen=True, slots=True)
class ManagerDisconnected:
    """The connection to the manager is broken."""


@dataclass(frozen=True, slots=True)
class ManagerLost:
    """The manager is unreachable, and the ranks of this node wait for ranks that went with it."""

    evidence: str


@dataclass(frozen=True, slots=True)
class RanksTrain:
    """The ranks make progress again, although the manager is still unreachable."""


@dataclass(frozen=True, slots=True)
class WarmedUp:
    """The warm-up is finished: from now on a worker starts at once."""


Order = (
    m.StartWorkers
    | m.ReplaceWorkers
    | m.RestartJob
    | m.RestartAgent
    | m.RestartWorkers
    | m.StopWorkers
    | m.EndWorkers
    | m.KeepShards
    | m.RequestHello
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
    | ManagerLost
    | RanksTrain
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
    store: str = ""
    """host:port of the store where it meets its peers; empty: the one of the first start."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    rank: Rank
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Forward the signal that requests a process to end."""

    rank: Rank
    incarnation: Incarnation
    signal: int


@dataclass(frozen=True, slots=True)
class PrepareStandby:
    """Prepare a standby process for the next rank that must be started, when there is time."""


@dataclass(frozen=True, slots=True)
class RenewStore:
    """Serve an empty store: the new attempt must not see the keys of the old one."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SendToManager:
    body: m.Body


@dataclass(frozen=True, slots=True)
class SendHello:
    """Send AgentHello: which workers run here. `agent/act.py` adds the addresses."""

    workers: tuple[m.LocalWorker, ...]
    attempt: int
    remaining: int
    condemned: str = ""
    shards: tuple[m.RankShard, ...] = ()


Command = (
    StartWorker
    | KillWorker
    | SignalWorker
    | PrepareStandby
    | RenewStore
    | SendToManager
    | SendHello
)
