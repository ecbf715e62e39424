"""What can be wrong with a rank, as clusterd is told it by the job or sees it in the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from taskd.model.ids import Rank


class FaultKind(StrEnum):
    """The three types that travel on the wire."""

    MEMORY = "0"
    """An error in on-chip memory: the process lives, its step can be repeated."""
    ORDINARY = "1"
    """Anything else: a process that died, hung or sits on a broken device."""
    NETWORK = "2"
    """A communication error: the process lives, its step can be repeated."""

    @property
    def retryable(self) -> bool:
        return self is not FaultKind.ORDINARY


@dataclass(frozen=True, slots=True)
class Fault:
    """One rank's fault within a round. A rank has at most one: the worst that is known of it."""

    rank: Rank
    kind: FaultKind = FaultKind.ORDINARY
    hardware: bool = False
    """Seen by the cluster, not only felt by the process."""
    in_place: bool = True
    """A new process on the same device can help."""
    evidence: str = ""


def worse(known: Fault, told: Fault) -> Fault:
    """Both at once: what cannot be repeated, or not be healed in place, stays so."""
    kind = known.kind if known.kind is FaultKind.ORDINARY else told.kind
    return replace(
        known,
        kind=kind,
        hardware=known.hardware or told.hardware,
        in_place=known.in_place and told.in_place,
        evidence=known.evidence or told.evidence,
    )


def merge(known: Iterable[Fault], told: Iterable[Fault]) -> tuple[Fault, ...]:
    """All faults, one a rank, in the order of the ranks."""
    merged: dict[Rank, Fault] = {}
    for fault in [*known, *told]:
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
    """One entry of the cluster's picture of the job: a device fault under a rank."""

    rank: Rank
    code: str
    level: str
    """The cluster's own name of the severity, such as RestartBusiness or SeparateNPU."""
    pod: str = ""
    """The uid of the pod that sat there. A fault of a pod that has left is no longer the job's."""

    @property
    def ignored(self) -> bool:
        return self.level in _IGNORED

    @property
    def sub_healthy(self) -> bool:
        return self.level == _SUB_HEALTHY

    @property
    def of_stress_test(self) -> bool:
        """A device says this of itself while a stress test runs on it."""
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
