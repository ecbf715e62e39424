"""What can be wrong with a rank, and every type that says so.

A fault takes one of these shapes on its way from the process to the decision:

1. `model/messages.WorkerExited` (agent -> manager): a worker process has ended, and how.
2. `model/messages.WorkerFailed` (worker -> manager): the process is alive, but its step has failed.
3. `Fault`: one rank is at fault. The manager makes it from 1 and 2, from silence and from hangs.
   Signals, the incident history, the journal and both decision machines use this same type.
4. `model/clusterd.FaultReport` (manager -> clusterd): all faults that the manager knows.
5. `SeenFault`: one device fault as the cluster reports it. `model/clusterd.FaultsSeen` holds all
   that are present in the cluster now.

On the wire, faults are Ascend's messages: `RanksFailed` on the bus, `FaultRank` and
`ProcessFaultRequest` in the Recover service (`wire/recover_codec.py`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from taskd.model.ids import Rank


class FaultKind(StrEnum):
    """The three fault types of the Recover service; the values are those on the wire."""

    MEMORY = "0"
    """An error in on-chip memory. The process is alive, and its step can be repeated."""
    ORDINARY = "1"
    """Everything else: a process that died, hangs, or runs on a broken device."""
    NETWORK = "2"
    """A communication error. The process is alive, and its step can be repeated."""

    @property
    def retryable(self) -> bool:
        return self is not FaultKind.ORDINARY

    @classmethod
    def parse(cls, text: str) -> FaultKind:
        """Read a fault type from the wire. An unknown one counts as ORDINARY."""
        return cls(text) if text in _KINDS else cls.ORDINARY


_KINDS = frozenset(kind.value for kind in FaultKind)


class FaultCause(StrEnum):
    """How the manager has learned of a fault. Shown to people and in `summary.json`."""

    EXITED = "exited"
    """The process ended."""
    SILENT = "silent"
    """Its node no longer answers."""
    LOST = "lost"
    """Its node or its agent has left."""
    HUNG = "hung"
    """The process is alive and makes no progress."""
    STUCK = "stuck"
    """It did not park in time."""
    NAMED = "named"
    """clusterd has named it: an operator, a stress test or a broken device."""
    UNREPAIRED = "unrepaired"
    """Retries did not help, so the rank needs a new process."""
    CORRUPT = "corrupt"
    """Its state is damaged."""
    MISCOMPUTED = "miscomputed"
    """Its device has computed a wrong gradient: it needs a new process, and soon another device."""
    EXCEPTION = "exception"
    """Its step raised an exception that can be retried."""
    COMMUNICATION = "communication"
    """It lost a collective."""

    @property
    def kind(self) -> FaultKind:
        return _CAUSES.get(self, FaultKind.ORDINARY)


_CAUSES = {
    FaultCause.CORRUPT: FaultKind.MEMORY,
    FaultCause.EXCEPTION: FaultKind.MEMORY,
    FaultCause.COMMUNICATION: FaultKind.NETWORK,
}


MOST_EVIDENCE = 64 << 10
"""Characters that are kept, from the end: there an error says what it is."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One rank is at fault. Only `rank`, `kind` and `evidence` travel between processes.

    Within a round a rank has at most one: the worst that is known (see `merge`).
    """

    rank: Rank
    kind: FaultKind = FaultKind.ORDINARY
    evidence: str = ""
    hardware: bool = False
    """clusterd: the cluster has seen it on the device, so it is more than the process's word."""
    in_place: bool = True
    """clusterd: a new process on the same device can help."""
    cause: FaultCause = FaultCause.EXITED
    """Manager: how it learned of the fault."""
    seen_at: float = 0.0
    """Manager: when, by its own clock."""

    @classmethod
    def of(cls, rank: Rank, cause: FaultCause, evidence: str, seen_at: float = 0.0) -> Fault:
        """The fault that this cause means."""
        return cls(rank, cause.kind, evidence[-MOST_EVIDENCE:], cause=cause, seen_at=seen_at)


def worse(known: Fault, new: Fault) -> Fault:
    """Both at once. A fault that cannot be retried, or not be healed in place, stays so."""
    kind = known.kind if known.kind is FaultKind.ORDINARY else new.kind
    return replace(
        known,
        kind=kind,
        hardware=known.hardware or new.hardware,
        in_place=known.in_place and new.in_place,
        evidence=known.evidence or new.evidence,
    )


def merge(known: Iterable[Fault], new: Iterable[Fault]) -> tuple[Fault, ...]:
    """All faults, one per rank, in the order of the ranks."""
    merged: dict[Rank, Fault] = {}
    for fault in [*known, *new]:
        before = merged.get(fault.rank)
        merged[fault.rank] = fault if before is None else worse(before, fault)
    return tuple(merged[rank] for rank in sorted(merged))


_IGNORED = {"", "NotHandleFault", "PreSeparateNPU", "PreSeparate", "NormalNPU", "NormalNetwork"}
_SUB_HEALTHY = "SubHealthFault"
_IN_PLACE = {"RestartRequest", "RestartBusiness"}
_STRESS_CODES = ("80818C05", "80818C06")
_CODES = {"80E01801": FaultKind.MEMORY, "8C1F860B": FaultKind.NETWORK}


@dataclass(frozen=True, slots=True, order=True)
class SeenFault:
    """One fault that the cluster reports on the device of a rank."""

    rank: Rank
    code: str
    level: str
    """The cluster's own name of the severity, such as RestartBusiness or SeparateNPU."""
    pod: str = ""
    """The uid of the pod on that device. A fault of a pod that has left is not the job's."""
    label: str = ""
    """What the pod's label `fault-type` must say, if faults together led to a verdict."""

    @property
    def ignored(self) -> bool:
        return self.level in _IGNORED

    @property
    def sub_healthy(self) -> bool:
        return self.level == _SUB_HEALTHY

    @property
    def of_stress_test(self) -> bool:
        """A device reports these codes about itself while a stress test runs on it."""
        return any(code in self.code for code in _STRESS_CODES)

    def as_fault(self) -> Fault:
        kinds = [kind for code, kind in _CODES.items() if code in self.code]
        return Fault(
            self.rank,
            kinds[0] if kinds else FaultKind.ORDINARY,
            hardware=True,
            in_place=self.level in _IN_PLACE,
            evidence=f"{self.level} {self.code}".strip(),
        )


def signal_text(number: int) -> str:
    """`signal 9, SIGKILL`; some numbers have no name."""
    try:
        return f"signal {number}, {signal.Signals(number).name}"
    except ValueError:
        return f"signal {number}"
