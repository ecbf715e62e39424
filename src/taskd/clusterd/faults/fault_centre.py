"""All faults that the cluster reports, by node, and what of them concerns each job.

Each report is read once, when it changes. A damaged one is ignored, and the last valid one counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from taskd.clusterd.cluster.interface import Cluster, Json, Key, Kind, key_of
from taskd.clusterd.cluster.objects import JobFacts
from taskd.clusterd.faults import node_reports as reports
from taskd.core.clusterd.fault_centre.hiding import JobRules
from taskd.core.clusterd.fault_centre.judge import Judged, judge, recent
from taskd.core.clusterd.fault_centre.public_faults import PublicFaults, as_node_faults
from taskd.core.clusterd.fault_centre.relations import Evidence
from taskd.model.ids import JobId, Rank
from taskd.model.node_faults import FaultKey, NodeFault
from taskd.model.strategies import Strategy
from taskd.runtime.clock import Clock

log = logging.getLogger(__name__)

NAMESPACES = {reports.DEVICE_REPORT: "kube-system", reports.NODE_REPORT: "mindx-dl"}
READERS: dict[str, Callable[[str, Json], tuple[NodeFault, ...]]] = {
    reports.DEVICE_REPORT: reports.device_report,
    reports.NODE_REPORT: reports.node_report,
}


@dataclass
class _Known:
    """One ConfigMap as it was last read."""

    body: Json
    faults: tuple[NodeFault, ...] = ()
    valid: bool = True


@dataclass
class _Job:
    evidence: Evidence = field(default_factory=Evidence)
    reported: dict[Rank, float] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()
    """The nodes whose pods are being replaced."""
    judged: Judged | None = None


class FaultCentre:
    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._cluster, self._clock = cluster, clock
        self._reports: dict[Key, _Known] = {}
        self._first_seen: dict[FaultKey, float] = {}
        self._jobs: dict[JobId, _Job] = {}
        self.public = PublicFaults()

    def node_of(self, key: Key) -> str | None:
        """The node that this ConfigMap reports about; None if it is not a report."""
        for prefix, namespace in NAMESPACES.items():
            if key.name.startswith(prefix) and key.namespace == namespace:
                return key.name.removeprefix(prefix)
        return None

    def is_valid(self, key: Key) -> bool:
        """Whether this report can be read as it is now."""
        node = self.node_of(key)
        if node is not None:
            self._read(node, key.name.removesuffix(node), key)
        return key in self._reports and self._reports[key].valid

    def on(self, node: str) -> list[NodeFault]:
        """All faults of a node now."""
        found: list[NodeFault] = []
        for prefix, namespace in NAMESPACES.items():
            found += self._read(node, prefix, Key(Kind.CONFIG_MAP, namespace, f"{prefix}{node}"))
        return [*map(self._dated, found), *as_node_faults(self.public.on(node))]

    def of_job(self, facts: JobFacts) -> Judged:
        """Judge the faults of a job, and remember the result until it is forgotten."""
        job = self._jobs.setdefault(facts.job, _Job())
        job.judged = self._judge(facts, job)
        job.evidence = job.judged.evidence
        return job.judged

    def shown_to(self, facts: JobFacts) -> tuple[NodeFault, ...]:
        """The faults of a job that subscribers may see."""
        known = self._jobs.get(facts.job)
        if known is None or known.judged is None:
            return self._judge(facts, _Job()).shown
        return known.judged.shown

    def shown(self) -> list[NodeFault]:
        """The faults of the whole cluster that the scheduler and subscribers may see."""
        withheld = self.withheld()
        return [f for node in sorted(self.nodes()) for f in self.on(node) if f.key not in withheld]

    def nodes(self) -> set[str]:
        """All nodes about which there is a report."""
        keys = map(key_of, self._cluster.all(Kind.CONFIG_MAP))
        named = {node for key in keys if (node := self.node_of(key)) is not None}
        return named | {node for node, _, _ in self.public.entries}

    def set_leaving(self, job: JobId, nodes: frozenset[str]) -> bool:
        """Whether this is new."""
        known = self._jobs.setdefault(job, _Job())
        new, known.leaving = known.leaving != nodes, nodes
        return new

    def _judge(self, facts: JobFacts, job: _Job) -> Judged:
        faults = [fault for node in {pod.node for pod in facts.pods} for fault in self.on(node)]
        now = self._clock()  # after the faults were dated: none of them may begin in the future
        strategies = facts.config.strategies
        rules = JobRules(
            retry=facts.enabled and Strategy.RETRY in strategies,
            in_place=facts.enabled and Strategy.RECOVER_IN_PLACE in strategies,
            ignores_sub_health=facts.config.sub_health == "ignore",
            master=next((pod.node for pod in facts.pods if pod.node_rank == 0), ""),
            leaving=job.leaving,
            reported=recent(job.reported, facts.pods, now),
        )
        return judge(faults, facts.pods, rules, facts.fault_filter, job.evidence, now)

    def withheld(self) -> frozenset[FaultKey]:
        """The keys of all faults that the scheduler must not see yet."""
        keys: set[FaultKey] = set()
        for job in self._jobs.values():
            if job.judged is not None:
                keys |= job.judged.withheld
        return frozenset(keys)

    def reported(self, job: JobId, ranks: Iterable[Rank]) -> None:
        """The job itself has reported repeatable faults of these ranks."""
        known, now = self._jobs.setdefault(job, _Job()), self._clock()
        known.reported |= dict.fromkeys(ranks, now)

    def forget(self, job: JobId) -> None:
        self._jobs.pop(job, None)

    def _read(self, node: str, prefix: str, key: Key) -> tuple[NodeFault, ...]:
        body = self._cluster.get(key)
        known = self._reports.get(key)
        if known is not None and known.body is body:
            return known.faults
        before = known.faults if known is not None else ()
        faults: tuple[NodeFault, ...] = ()
        if body is None:
            self._reports.pop(key, None)
        else:
            valid = True
            try:
                faults = READERS[prefix](node, body)
            except reports.InvalidReport as error:
                log.warning("%s is ignored: %s", key, error)
                faults, valid = before, False
            self._reports[key] = _Known(body, faults, valid)
        for gone in {fault.key for fault in before} - {fault.key for fault in faults}:
            self._first_seen.pop(gone, None)
        return faults

    def _dated(self, fault: NodeFault) -> NodeFault:
        """A fault began when its reporter says so, but not after we first saw it: the clock of a
        node may be wrong."""
        seen = self._first_seen.setdefault(fault.key, self._clock())
        return replace(fault, since=min(fault.since or inf, seen))
