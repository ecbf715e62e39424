"""Statuses and histories as text: tables whose columns fit, times in milliseconds, no colours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from taskd.wire._pb import control_pb2 as pb

KINDS = {"0": "memory", "1": "process", "2": "communication"}


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


def status(told: pb.JobStatus, now_ms: int) -> str:
    line = told.line
    parts = [
        f"job {line.job} ({line.name or 'unnamed'})",
        f"  state      {line.state}, for {_span(now_ms - line.changed_unix_ms)}"
        + (f": {line.because}" if line.because else ""),
        f"  incident   {line.incident}" + (f", strategy {told.strategy}" if told.strategy else ""),
        f"  strategies {', '.join(told.strategies)}",
        f"  client     {'subscribed' if line.subscribed else 'not subscribed'}",
    ]
    if told.deadline_unix_ms:
        parts.append(f"  gives up   in {_span(told.deadline_unix_ms - now_ms)}")
    if line.step:
        parts.append(f"  step       {line.step}, {line.steps_per_s:.2f} steps/s")
    if told.manager:
        parts.append(f"  manager    {told.manager}")
    if told.profiling:
        parts.append(f"  recording  {told.profiling}")
    for slow in told.stragglers:
        since = _span(now_ms - slow.since_unix_ms)
        parts.append(f"  straggler  {slow.evidence} (for {since})")
    if told.operation:
        parts.append(f"  operation  {told.operation}")
    for fault in told.faults:
        parts.append(f"  fault      {_fault(fault)}")
    if told.ranks:
        parts += ["", _ranks(told.ranks)]
    if told.rounds:
        parts += ["", _rounds(told.rounds)]
    return "\n".join(parts)


def history(lines: Iterable[pb.HistoryLine]) -> Iterable[str]:
    """Each incident with its time, and each decision with its reason and its distance from it."""
    incident, began = -1, 0
    for line in lines:
        if line.incident != incident:
            incident, began = line.incident, line.at_unix_ms
            title = f"incident {incident}" if incident else "before any incident"
            yield f"{title}, {_time(began)}"
        change = line.after if line.before == line.after else f"{line.before} -> {line.after}"
        yield f"  {line.at_unix_ms - began:>8} ms  {change}: {line.because or 'noted'}"
        yield f"               heard {line.event}"
        for command in line.commands:
            yield f"               does  {command}"


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
    head = ("RANK", "NODE", "HOST", "PID", "LIFE", "PHASE", "STEP", "IDLE S", "NOTE")
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
