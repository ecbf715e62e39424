"""Closed incidents for the history: clusterd's journal, the dashboard and the report get these.

What the ranks did when an incident began is kept from the last heartbeats before it, because the
next ones already show the recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, takewhile

from taskd.core.manager.states import Job
from taskd.model.ids import NodeRank
from taskd.model.manager import IncidentRecord
from taskd.model.messages import Progress
from taskd.wire._pb import control_pb2 as control

MAX_FAULTS, MAX_RANKS, MAX_LINKS = 64, 512, 256
MAX_EVIDENCE, MAX_STACK, MAX_STACKS = 16_384, 8_192, 262_144
"""Characters: of one evidence, of one stack, of all stacks."""
LinkChange = tuple[NodeRank, str, str, int, int]
"""Node, link, counter, growth, total."""


class IncidentReports:
    """Collects the reports of one job; the publisher sends them in order."""

    def __init__(
        self,
        job: str,
        monotonic_to_wall: float,
        link_changes: Callable[[], Iterable[LinkChange]] = tuple,
        on_report: Callable[[control.IncidentReport], None] = lambda report: None,
    ) -> None:
        """`monotonic_to_wall`: the time of day when the monotonic clock was 0.

        `on_report` is called with every report and must return at once.
        """
        self._on_report = on_report
        self._job, self._offset, self._link_changes = job, monotonic_to_wall, link_changes
        self._last: IncidentRecord | None = None
        self._activity: dict[int, Progress] = {}
        self.waiting: list[control.IncidentReport] = []

    def observe(
        self, before: Job, after: Job, progress: Mapping[int, Progress]
    ) -> list[IncidentRecord]:
        """Call it after every decision of the manager. Returns the incidents that are now over."""
        if before.open_incident is None and after.open_incident is not None:
            self._activity = dict(progress)
        if after.past_incidents is before.past_incidents:
            return []
        records = reversed(after.past_incidents)
        new = [*takewhile(lambda record: record is not self._last, records)][::-1]
        if after.past_incidents:
            self._last = after.past_incidents[-1]
        for record in new:
            report = self._report(record, after)
            self.waiting.append(report)
            self._on_report(report)
        return new

    def _report(self, record: IncidentRecord, job: Job) -> control.IncidentReport:
        return control.IncidentReport(
            job=self._job,
            incident=record.incident,
            phases=phases_of(record, self._offset),
            strategy=str(record.strategy),
            outcome=record.outcome,
            because=record.because,
            faults=list(_faults(record, job)),
            ranks=activity_of(self._activity, {int(fault.rank) for fault in record.faults}),
            links=[
                control.LinkChange(
                    node=node,
                    host=known.host if (known := job.view.nodes.get(node)) is not None else "",
                    link=link,
                    counter=counter,
                    change=growth,
                    total=total,
                )
                for node, link, counter, growth, total in islice(self._link_changes(), MAX_LINKS)
            ],
        )


def phases_of(record: IncidentRecord, offset: float) -> list[control.Phase]:
    before = record.timestamps[0][1]
    phases = []
    for name, at in record.timestamps:
        phases.append(
            control.Phase(
                name=name, at_unix_ms=round((at + offset) * 1000), took_ms=(at - before) * 1000.0
            )
        )
        before = at
    return phases


def _faults(record: IncidentRecord, job: Job) -> Iterable[control.IncidentFault]:
    for fault in record.faults[:MAX_FAULTS]:
        view = job.view.ranks.get(fault.rank)
        node = job.view.nodes.get(view.node) if view is not None else None
        yield control.IncidentFault(
            rank=fault.rank,
            node=view.node if view is not None else -1,
            host=node.host if node is not None else "",
            cause=str(fault.cause),
            evidence=_utf8(fault.evidence[-MAX_EVIDENCE:]),
        )


def activity_of(
    progress: Mapping[int, Progress], faulty: set[int]
) -> Sequence[control.RankActivity]:
    """Of a large job: the faulty ranks, those with a stack, and those that are behind, first."""
    ahead = max(((p.step, p.collective) for p in progress.values()), default=(0, 0))
    order = sorted(
        progress.values(),
        key=lambda p: (p.rank not in faulty, not p.stack, (p.step, p.collective) == ahead, p.rank),
    )
    left = MAX_STACKS
    found = []
    for each in order[:MAX_RANKS]:
        stack = _utf8(each.stack[: min(MAX_STACK, left)])
        left -= len(stack)
        found.append(
            control.RankActivity(
                rank=each.rank,
                step=each.step,
                collective=each.collective,
                waiting=each.waiting,
                idle_s=each.idle_s,
                stack=stack,
            )
        )
    return sorted(found, key=lambda activity: activity.rank)


def _utf8(text: str) -> str:
    return text.encode(errors="replace").decode()
