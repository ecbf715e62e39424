"""Incidents as people see them, from the lines of a job's history. Pure.

What one disturbance has caused is shown as one incident, also if new faults gave it several
numbers: it lasts from the first fault until the job trains again or is given up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

from google.protobuf.json_format import Parse, ParseError

from taskd.clusterd.services.control_service import INCIDENT_REPORT, OPERATOR_ACTION
from taskd.core.agent.error_text import headline
from taskd.model.faults import FaultCause, FaultKind
from taskd.model.strategies import LADDER
from taskd.wire._pb import control_pb2 as pb

PHASES = ("seen", "stopped", "decided", "forked", "groups", "state", "step")
QUIET = ("Idle", "Shrunk")
"""clusterd's states in which the job trains."""
OPERATIONS = ("Pausing", "SwitchingNic", "StressTesting", "Resuming")
ENDED = "Ended"
FAILED = ("ended",)
"""Outcomes after which the job does not train any more."""
COMMUNICATION = FaultCause.COMMUNICATION.value
EARLIER = 50
"""How many earlier incidents the median of a phase is taken from."""
TITLE = 160
MOST_NOTES = 50
SUB_HEALTH = "SubHealth"


@dataclass
class Incident:
    """One disturbance: the lines of its history, and the manager's reports about it."""

    lines: list[pb.HistoryLine] = field(default_factory=list)
    reports: list[pb.IncidentReport] = field(default_factory=list)
    over: bool = False
    in_brief: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """Made once, after `read` is done with it."""

    @property
    def number(self) -> int:
        return max((line.incident for line in self.lines), default=0)

    @property
    def numbers(self) -> list[int]:
        return sorted({line.incident for line in self.lines})

    @property
    def operation(self) -> bool:
        """The job was paused by an order, not by a fault."""
        return any(line.after in OPERATIONS for line in self.lines) and not self.faults()

    def faults(self) -> list[dict[str, Any]]:
        """One per rank, with all its evidence; the manager's reports know more than clusterd.

        Those that caused the incident come first. A rank whose collective failed because of
        another rank has only noticed it.
        """
        known: dict[int, dict[str, Any]] = {}
        for line in self.lines:
            if line.event.startswith("FaultReport("):
                for rank, cause in _ranks_in(line.event):
                    evidence = _in_brackets(line.because)
                    known.setdefault(rank, _fault(rank, cause=cause, evidence=evidence))
        for report in self.reports:
            for fault in report.faults:
                cause, evidence = fault.cause, fault.evidence
                if cause == FaultCause.NAMED and known.get(fault.rank, {}).get("evidence"):
                    # Here clusterd knows more: who reported the fault, and what was seen.
                    cause, evidence = "reported", known[fault.rank]["evidence"]
                known[fault.rank] = _fault(fault.rank, fault.node, fault.host, cause, evidence)
        only_links = all(each["cause"] == COMMUNICATION for each in known.values())
        for each in known.values():
            each["noticed"] = each["cause"] == COMMUNICATION and not only_links
        return sorted(known.values(), key=lambda each: (each["noticed"], each["rank"]))

    def causes(self) -> list[dict[str, Any]]:
        """The faults without those that are only a consequence of another one."""
        return [fault for fault in self.faults() if not fault["noticed"]]


def read(lines: Iterable[pb.HistoryLine]) -> list[Incident]:
    """All incidents, oldest first. Lines before the first fault belong to none."""
    found: list[Incident] = []
    reports: list[pb.IncidentReport] = []
    for line in lines:
        if line.event.startswith(INCIDENT_REPORT):
            if (report := report_in(line)) is not None:
                reports.append(report)
        elif line.incident and not line.event.startswith((OPERATOR_ACTION, SUB_HEALTH)):
            _add(found, line)
    by_number = {number: incident for incident in found for number in incident.numbers}
    for report in reports:
        if report.incident in by_number:
            by_number[report.incident].reports.append(report)
    return found


def _add(found: list[Incident], line: pb.HistoryLine) -> None:
    last = found[-1] if found else None
    continues = last is not None and (not last.over or line.incident == last.number)
    if not continues:
        if line.after in QUIET and line.before in QUIET:
            return
        last = Incident()
        found.append(last)
    assert last is not None
    if last.over and (line.after == line.before or (line.before in QUIET and line.after == ENDED)):
        return  # nothing happened after its end; the end of the job later is not part of it
    last.lines.append(line)
    last.over = line.after in (*QUIET, ENDED)


def report_in(line: pb.HistoryLine) -> pb.IncidentReport | None:
    """None if the line does not hold a report that this version can read."""
    return _parsed(line.event.removeprefix(INCIDENT_REPORT))


@lru_cache(maxsize=1_000)
def _parsed(text: str) -> pb.IncidentReport | None:
    """A page reads the whole history again with each new line."""
    try:
        report: pb.IncidentReport = Parse(text, pb.IncidentReport(), ignore_unknown_fields=True)
    except (ParseError, RecursionError):
        return None
    return report


NOTES = {SUB_HEALTH: "slow", "FaultsSeen(": "device", OPERATOR_ACTION: "action"}


def notes(lines: Iterable[pb.HistoryLine]) -> list[dict[str, Any]]:
    """Reports about the health of ranks and devices, and what operators did. Newest first."""
    found = [
        {"kind": kind, "atUnixMs": line.at_unix_ms, "text": line.because}
        for line in lines
        for begin, kind in NOTES.items()
        if line.event.startswith(begin) and line.because
    ]
    return found[::-1][:MOST_NOTES]


# What is shown


def shown(found: Sequence[Incident], index: int) -> dict[str, Any]:
    """One incident with everything that is known about it."""
    incident = found[index]
    began = incident.lines[0].at_unix_ms
    return {
        **brief(incident),
        "lanes": lanes(found, index),
        "ladder": ladder(incident),
        "decisions": [
            {
                "atMs": line.at_unix_ms - began,
                "incident": line.incident,
                "before": line.before,
                "after": line.after,
                "because": line.because,
                "event": line.event,
                "commands": list(line.commands),
            }
            for line in incident.lines
        ],
        "faults": incident.faults(),
        "ranks": [
            {
                "rank": each.rank,
                "step": each.step,
                "collective": each.collective,
                "waiting": each.waiting,
                "idleS": each.idle_s,
                "stack": each.stack,
            }
            for report in incident.reports[:1]
            for each in report.ranks
        ],
        "links": [
            {
                "node": each.node,
                "host": each.host,
                "link": each.link,
                "counter": each.counter,
                "change": each.change,
                "total": each.total,
            }
            for report in incident.reports[-1:]
            for each in report.links
        ],
    }


def brief(incident: Incident) -> dict[str, Any]:
    """One incident in a list."""
    if incident.in_brief is None:
        incident.in_brief = _brief(incident)
    return incident.in_brief


def _brief(incident: Incident) -> dict[str, Any]:
    first, last = incident.lines[0], incident.lines[-1]
    strategy, outcome = "", "open"
    for report in incident.reports:
        strategy, outcome = report.strategy or strategy, report.outcome or outcome
    if incident.over and outcome in ("open", "superseded"):
        outcome = "ended" if last.after == ENDED else "recovered"
    if not strategy:
        strategy = next((row["strategy"] for row in ladder(incident) if row["chosen"]), "")
    ended = max((line.at_unix_ms for line in _until_over(incident)), default=first.at_unix_ms)
    return {
        "incident": incident.number,
        "numbers": incident.numbers,
        "beganUnixMs": first.at_unix_ms,
        "tookMs": _took_ms(incident, ended),
        "open": not incident.over,
        "kind": "operation" if incident.operation else "fault",
        "outcome": outcome,
        "good": incident.over and outcome not in FAILED,
        "strategy": "" if incident.operation else strategy,
        "title": title(incident),
        "because": _result(incident),
        "ranks": [fault["rank"] for fault in incident.causes()],
        "nodes": sorted({f["node"] for f in incident.causes() if f["node"] >= 0}),
    }


def title(incident: Incident) -> str:
    faults = incident.causes()
    if not faults:
        return incident.lines[0].because or incident.lines[0].after
    ranks = ", ".join(str(fault["rank"]) for fault in faults[:4])
    more = f" and {len(faults) - 4} more" if len(faults) > 4 else ""
    worst = max(faults, key=lambda fault: bool(fault["evidence"]))
    last = headline(worst["evidence"])
    text = f"rank{'s' * (len(faults) > 1)} {ranks}{more}"
    last = last.strip().removeprefix(f"{text} ")
    if worst["cause"] and worst["cause"] not in last:
        text += f" {worst['cause']}"
    return (f"{text}: {last}" if last else text)[:TITLE]


def lanes(found: Sequence[Incident], index: int) -> list[dict[str, Any]]:
    """The phases of an incident, each beside the median of the same phase in earlier ones.

    A pause by order is compared with earlier pauses only: a stress test takes as long as it takes.
    """
    incident = found[index]
    alike = [each for each in found[:index] if each.operation == incident.operation]
    earlier = [phase_durations(each) for each in alike[-EARLIER:]]
    return [
        {
            "name": name,
            "tookMs": took,
            "medianMs": median(past) if (past := [e[name] for e in earlier if name in e]) else None,
        }
        for name, took in phase_durations(incident).items()
    ]


def phase_durations(incident: Incident) -> dict[str, float]:
    """Milliseconds per phase, from the first fault on, over all reports of the incident."""
    moments: dict[str, float] = {}
    began = None
    for report in incident.reports:
        for phase in report.phases:
            if began is None:
                began = phase.at_unix_ms
            moments[phase.name] = float(phase.at_unix_ms)
    if began is None:
        return {}
    if len(incident.reports) == 1:
        return {phase.name: phase.took_ms for phase in incident.reports[0].phases[1:]}
    order = sorted((at, name) for name, at in moments.items() if name != "seen")
    spans, before = {}, float(began)
    for at, name in order:
        spans[name] = max(0.0, at - before)
        before = at
    return spans


_CHOSEN = re.compile(r"(\S+) is (?:the first choice|chosen(?: \((.*)\))?)$", re.DOTALL)


def ladder(incident: Incident) -> list[dict[str, Any]]:
    """Every strategy, with what spoke against it, as the last decision of the incident says."""
    sentence = next(
        (
            m
            for line in reversed(incident.lines)
            for part in line.because.split("; then ")
            if (m := _CHOSEN.search(part))
        ),
        None,
    )
    if sentence is None:
        return []
    chosen, rejected = sentence[1], objections(sentence[2] or "")
    rows, passed = [], False
    for strategy in LADDER:
        is_chosen = strategy.value == chosen
        because = rejected.get(
            strategy.value, "not needed" if passed else "not allowed in this job"
        )
        rows.append(
            {
                "strategy": strategy.value,
                "chosen": is_chosen,
                "because": line_of(sentence) if is_chosen else because,
            }
        )
        passed = passed or is_chosen
    return rows


def line_of(sentence: re.Match[str]) -> str:
    return "no objection" if sentence[2] else "the first choice"


def objections(text: str) -> dict[str, str]:
    """`retry: the job does not offer it; recover: …` by strategy."""
    names = "|".join(re.escape(strategy.value) for strategy in LADDER)
    parts = re.split(rf"(?:^|; )({names}): ", text)
    return dict(zip(parts[1::2], parts[2::2], strict=False))


def _until_over(incident: Incident) -> list[pb.HistoryLine]:
    """Without what came after the end, such as a tick in the same state."""
    for at, line in enumerate(incident.lines):
        if line.after in (*QUIET, ENDED) and at:
            return incident.lines[: at + 1]
    return incident.lines


def _took_ms(incident: Incident, ended: int) -> float:
    if incident.reports and incident.reports[-1].phases:
        first, last = incident.reports[0].phases[0], incident.reports[-1].phases[-1]
        if len(incident.reports) == 1:
            return sum(phase.took_ms for phase in incident.reports[0].phases)
        return float(last.at_unix_ms - first.at_unix_ms)
    return float(ended - incident.lines[0].at_unix_ms)


def _result(incident: Incident) -> str:
    lines = _until_over(incident)
    return next((line.because for line in reversed(lines) if line.because), "")


def _fault(
    rank: int, node: int = -1, host: str = "", cause: str = "", evidence: str = ""
) -> dict[str, Any]:
    return {"rank": rank, "node": node, "host": host, "cause": cause, "evidence": evidence}


_FAULT = re.compile(r"Fault\(rank=(\d{1,8})(?:, kind=(\d))?")


def _ranks_in(event: str) -> list[tuple[int, str]]:
    """Each rank, with `communication` if that is what failed."""
    return [
        (int(rank), COMMUNICATION if kind == FaultKind.NETWORK.value else "")
        for rank, kind in _FAULT.findall(event)[:64]
    ]


def _in_brackets(sentence: str) -> str:
    match = re.search(r"\((.*)\)$", sentence, re.DOTALL)
    return match[1] if match else ""
