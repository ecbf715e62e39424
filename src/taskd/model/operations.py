"""Values for operations on a running job: stress tests and switches of the network interface.

`core/worker/stress_verdict.py` judges what the ranks measured,
`core/manager/operation_progress.py` tracks an operation in the manager. The bus messages
(codes 204 and 205) are in `model/messages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from taskd.model.ids import Position, Rank
from taskd.model.messages import Body
from taskd.model.types import Tick

COMPUTE, P2P = 0, 1
OPS = {"compute": COMPUTE, "p2p": P2P}
"""The tests of a stress test, by their names on the command line."""

PASSED, NOT_RUN, FAULTY, TIMED_OUT, UNSETTLED = "0", "1", "2", "3", "4"
"""Result codes of one test, as Ascend numbers them."""


@dataclass(frozen=True, slots=True)
class OpResult:
    code: str
    text: str = ""


Results = Mapping[str, OpResult]
"""By test, as on the wire: "0", "1"."""


# Events


@dataclass(frozen=True, slots=True)
class NicSwitchRequested:
    """clusterd has paused the job and wants these ranks on the backup interface, or back."""

    uuid: str
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StressTestRequested:
    uuid: str
    ops: Mapping[Rank, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WorkerReplied:
    """A worker has sent a message. Any message that is not a result counts as a keep-alive."""

    rank: Rank
    body: Body


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """The job is not paused any more, for whatever reason."""


Event = NicSwitchRequested | StressTestRequested | WorkerReplied | PauseEnded | Tick


# Commands


@dataclass(frozen=True, slots=True)
class SendToWorker:
    to: Position
    body: Body


@dataclass(frozen=True, slots=True)
class NicResult:
    ok: bool


@dataclass(frozen=True, slots=True)
class StressResult:
    results: Mapping[Rank, Results]


Reply = NicResult | StressResult
Command = SendToWorker | Reply
