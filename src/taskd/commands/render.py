"""The output of commands: plain text that can be searched with grep, and JSON for programs.

The text has no colours and no wrapped cells, whether it goes to a terminal or to a file.
docs/reference/json.md describes the JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

from taskd.clusterd.services.control_service import INCIDENT_REPORT
from taskd.dashboard import incidents, views
from taskd.runtime import json_text
from taskd.runtime.plain_text import one_line
from taskd.wire._pb import control_pb2 as pb

TICK = "Tick()"
"""The event of a line that only says that time has passed."""
MOST_TEXT = 600
"""Characters of one event in the history."""
KINDS = {"0": "memory", "1": "process", "2": "communication"}


def as_json(message: Message) -> str:
    """One line of JSON with every field of the message, and numbers as numbers.

    (protobuf's own JSON has int64 as strings and leaves out fields that are 0 or empty.)
    """
    return json_text.dumps(_plain(message), separators=json_text.SPACED)


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return {f.json_name: _plain(getattr(value, f.name)) for f in value.DESCRIPTOR.fields}
    if isinstance(value, str | int | float):
        return value
    return [_plain(one) for one in value]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def jobs(listed: Sequence[pb.JobLine]) -> str:
    if not listed:
        return "no jobs"
    rows = [
        (
            line.job,
            line.name,
            line.state,
            str(line.incident),
            str(line.world or "-"),
            str(line.step or "-"),
            f"{line.steps_per_s:.2f}" if line.steps_per_s else "-",
            "yes" if line.subscribed else "no",
            line.because,
        )
        for line in listed
    ]
    head = ("JOB", "NAME", "STATE", "INCIDENT", "RANKS", "STEP", "STEPS/S", "CLIENT", "BECAUSE")
    return table(head, rows)


def status(job: pb.JobStatus, now_ms: int) -> str:
    line = job.line
    name = f" ({line.name})" if line.name not in ("", line.job) else ""
    parts = [f"job {line.job}{name}: {views.health_of(job, views.LIVE)[1]}"]
    if line.step:
        parts.append(f"  step       {_progress(job)}")
    parts += [
        f"  incident   {line.incident}" + (f", strategy {job.strategy}" if job.strategy else ""),
        f"  clusterd   {line.state}, for {_span(now_ms - line.changed_unix_ms)}"
        + (f": {line.because}" if line.because else ""),
        f"  strategies {', '.join(job.strategies)}",
        f"  client     {'subscribed' if line.subscribed else 'not subscribed'}",
    ]
    if job.deadline_unix_ms:
        parts.append(f"  timeout    in {_span(job.deadline_unix_ms - now_ms)}")
    if job.manager:
        parts.append(f"  manager    {job.manager}")
    if job.profiling:
        parts.append(f"  recording  {job.profiling}")
    for slow in job.stragglers:
        since = _span(now_ms - slow.since_unix_ms)
        parts.append(f"  straggler  {slow.evidence} (for {since})")
    if job.operation:
        parts.append(f"  operation  {job.operation}")
    for fault in job.faults:
        parts.append(f"  fault      {_fault(fault)}")
    if job.ranks:
        parts += ["", _ranks(job.ranks)]
    if job.rounds:
        parts += ["", _rounds(job.rounds)]
    return "\n".join(parts)


def _progress(job: pb.JobStatus) -> str:
    line, total = job.line, job.total_steps
    text = f"{line.step} of {total}" if total > 0 else f"{line.step}"
    text += f", {line.steps_per_s:.2f} steps/s"
    if line.steps_per_s and total > line.step:
        text += f", {_span(round(1000 * (total - line.step) / line.steps_per_s))} left"
    return text + (f", goodput {100 * job.goodput:.1f} %" if job.goodput else "")


def history(lines: Sequence[pb.HistoryLine], with_messages: bool = False) -> Iterable[str]:
    """Each incident with its time, and its decisions with their reasons and relative times."""
    titles = {
        number: brief
        for brief in map(incidents.brief, incidents.read(lines))
        for number in brief["numbers"]
    }
    incident, began = -1, 0
    for line in lines:
        if line.incident != incident:
            incident, began = line.incident, line.at_unix_ms
            title = f"incident {incident}" if incident else "before any incident"
            yield f"{title}, {_time(began)}{_result(titles.get(incident))}"
        if line.event == TICK and line.before == line.after and not with_messages:
            continue
        change = line.after if line.before == line.after else f"{line.before} -> {line.after}"
        yield f"  {line.at_unix_ms - began:>8} ms  {change}: {_brief(line.because) or 'no change'}"
        if not with_messages:
            continue
        if not line.event.startswith(INCIDENT_REPORT):  # `because` says the same in one line
            yield f"               event    {_brief(line.event)}"
        for command in line.commands:
            yield f"               command  {_brief(command)}"


def _result(incident: dict[str, Any] | None) -> str:
    if incident is None:
        return ""
    result = f"{incident['outcome']} in {incident['tookMs']:.0f} ms"
    if incident["open"]:
        result = "in progress"
    if incident["strategy"]:
        result = f"{incident['strategy']}: {result}"
    return f": {_brief(incident['title'])} -> {result}"


def _brief(text: str) -> str:
    """On one line; --json shows all of it."""
    line = one_line(text)
    return line if len(line) <= MOST_TEXT else f"{line[:MOST_TEXT]}…"


def _ranks(ranks: Iterable[pb.RankStatus]) -> str:
    rows = [
        (
            str(rank.rank),
            str(rank.node),
            rank.host,
            str(rank.pid or "-"),
            str(rank.incarnation),
            rank.phase,
            str(rank.step),
            f"{rank.idle_s:.1f}",
            rank.note,
        )
        for rank in ranks
    ]
    head = ("RANK", "NODE", "HOST", "PID", "INCARNATION", "PHASE", "STEP", "IDLE S", "NOTE")
    return table(head, rows)


def _rounds(rounds: Iterable[pb.Round]) -> str:
    rows = [
        (
            str(past.incident),
            _time(past.began_unix_ms),
            f"{past.took_ms} ms",
            past.strategy,
            ", ".join(str(fault.rank) for fault in past.faults[:8]),
            past.outcome,
        )
        for past in rounds
    ]
    return table(("INCIDENT", "BEGAN", "TOOK", "BY", "RANKS", "OUTCOME"), rows)


def _fault(fault: pb.JobFault) -> str:
    kind = KINDS.get(fault.fault_type, fault.fault_type)
    return f"rank {fault.rank}, {kind}" + (f": {fault.evidence}" if fault.evidence else "")


def _time(unix_ms: int) -> str:
    return f"{datetime.fromtimestamp(unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _span(ms: int) -> str:
    seconds = max(ms, 0) / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
