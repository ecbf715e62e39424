"""Operations on a running job, in words: stress tests and links that move to another interface.

`core/worker/stress_verdict.py` judges what the ranks have measured,
`core/manager/operation_progress.py` follows an operation in the manager. The messages themselves
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
"""The operations of a stress test, by the names that people type."""

PASSED, NOT_RUN, FAULTY, TIMED_OUT, UNSETTLED = "0", "1", "2", "3", "4"
"""The codes of one operation's result, as Ascend numbers them."""


@dataclass(frozen=True, slots=True)
class OpResult:
    code: str
    text: str


Results = Mapping[str, OpResult]
"""By operation, as on the wire: "0", "1"."""


# Events


@dataclass(frozen=True, slots=True)
class NicSwitchRequested:
    """clusterd has paused the job and wants these ranks on their backup, or back."""

    uuid: str
    ranks: tuple[Rank, ...]
    to_backup: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class StressTestRequested:
    uuid: str
    ops: Mapping[Rank, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WorkerReplied:
    """A worker has spoken; anything but an answer is a sign of life."""

    rank: Rank
    body: Body


@dataclass(frozen=True, slots=True)
class PauseEnded:
    """The pause is over, whatever ended it."""


Event = NicSwitchRequested | StressTestRequested | WorkerReplied | PauseEnded | Tick


# Commands


@dataclass(frozen=True, slots=True)
class SendToWorker:
    to: Position
    body: Body


@dataclass(frozen=True, slots=True)
class ReplyNicSwitch:
    ok: bool


@dataclass(frozen=True, slots=True)
class ReplyStressTest:
    results: Mapping[Rank, Results]


Reply = ReplyNicSwitch | ReplyStressTest
Command = SendToWorker | Reply
