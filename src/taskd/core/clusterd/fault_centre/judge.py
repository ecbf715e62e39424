"""The faults of one job: which it must handle, which others may see, and when that changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from taskd.core.clusterd.fault_centre.accompanying import without_companions
from taskd.core.clusterd.fault_centre.fault_filter import FaultFilter, still_waiting
from taskd.core.clusterd.fault_centre.fault_levels import level_of
from taskd.core.clusterd.fault_centre.hiding import JobRules, Place, hide
from taskd.core.clusterd.fault_centre.relations import Evidence, Related, relate
from taskd.model.clusterd import Pod
from taskd.model.faults import SeenFault
from taskd.model.ids import Rank
from taskd.model.node_faults import WHOLE_NODE, FaultKey, NodeFault

REPORT_LIFETIME_S = 60.0
"""How long the job's own report of a repeatable fault counts."""


@dataclass(frozen=True, slots=True)
class Judged:
    seen: tuple[SeenFault, ...]
    """For the job's own recovery."""
    shown: tuple[NodeFault, ...]
    """For the scheduler and for subscribers."""
    withheld: frozenset[FaultKey]
    """The keys of the job's faults that they must not see yet."""
    evidence: Evidence = field(default_factory=Evidence)
    again_at: float = float("inf")
    """When the result changes by itself."""


def judge(
    faults: Iterable[NodeFault],
    pods: Sequence[Pod],
    rules: JobRules,
    chosen: FaultFilter,
    evidence: Evidence,
    now: float,
) -> Judged:
    places = _places(pods)
    mine = [fault for fault in faults if _ranks(fault, places)]
    counted, waits_until = still_waiting(mine, chosen, now)
    alone, decided_at = without_companions(counted, rules.reported, now)
    uids = {
        node: ",".join(sorted({pod.uid for pod in pods if pod.node == node}))
        for node in {pod.node for pod in pods}
    }
    evidence, evidence_until = relate(evidence, alone, uids, now)
    hidden = hide(alone, rules, now)
    seen = [
        SeenFault(rank, fault.code, level_of(fault), uid)
        for fault in hidden.job
        for rank, uid in _ranks(fault, places)
    ]
    for related in evidence.judged.values():
        seen += _related(related, places)
    return Judged(
        tuple(sorted(set(seen))),
        tuple(sorted(hidden.cluster)),
        frozenset(fault.key for fault in mine) - {fault.key for fault in hidden.cluster},
        evidence,
        min(waits_until, decided_at, evidence_until, hidden.again_at),
    )


def recent(reported: Mapping[Rank, float], pods: Iterable[Pod], now: float) -> dict[Place, float]:
    """The job's own reports by node and device, without those that are too old."""
    return {
        (pod.node, device): reported[rank]
        for pod in pods
        for rank, device in zip(pod.ranks, pod.devices, strict=False)
        if rank in reported and now < reported[rank] + REPORT_LIFETIME_S
    }


_Places = Mapping[Place, list[tuple[Rank, str]]]
"""The ranks and the uids of their pods, by node and device; and of the whole node."""


def _places(pods: Iterable[Pod]) -> _Places:
    places: dict[Place, list[tuple[Rank, str]]] = {}
    for pod in pods:
        for rank, device in zip(pod.ranks, pod.devices, strict=False):
            for at in (device, WHOLE_NODE):
                places.setdefault((pod.node, at), []).append((rank, pod.uid))
    return places


def _ranks(fault: NodeFault, places: _Places) -> list[tuple[Rank, str]]:
    return places.get((fault.node, fault.device), [])


def _related(related: Related, places: _Places) -> list[SeenFault]:
    verdict = related.verdict
    return [
        SeenFault(rank, related.because, verdict.level, uid, verdict.value)
        for rank, uid in _ranks(related.link, places)
    ]
