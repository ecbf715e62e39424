"""An incident in one line for a person: who failed, what was done about it, how long it took.

An incident is a dictionary here, as in the manager's `summary.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from taskd.core.agent.error_text import fault_line
from taskd.model.faults import FaultCause

SUPERSEDED, RESTARTED = "superseded", "restarted"
UNFINISHED = "not finished when the job ended"
MOST_TEXT = 100
"""Characters of how a rank ended."""
MOST_RANKS = 16


def groups(incidents: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """What belongs together: an incident, and those before it that a new fault interrupted."""
    found: list[list[dict[str, Any]]] = []
    interrupted = False
    for incident in incidents:
        if not interrupted:
            found.append([])
        found[-1].append(incident)
        interrupted = incident["outcome"] == SUPERSEDED
    return found


def line(group: Sequence[dict[str, Any]], with_phases: bool = True) -> str:
    """May hold any characters of what a process has printed."""
    faults = {fault["rank"]: _cause(fault) for each in group for fault in each["faults"]}
    parts: Counter[str] = Counter()
    for incident in group:
        parts.update(incident["parts_ms"])
    took = f"{sum(parts.values()):.0f} ms" if parts else ""
    if took and with_phases:
        took += f" ({', '.join(f'{name} {ms:.0f}' for name, ms in parts.items())})"
    last = group[-1]
    number = f"{last['incident']}"
    if len(group) > 1:
        number = f"{group[0]['incident']} to {number}"
    return f"incident {number}: {_answer(faults, last, took)}"


def _answer(faults: dict[int, str], last: dict[str, Any], took: str) -> str:
    ended = last["outcome"] not in ("", SUPERSEDED)
    if not faults:
        return (
            f"paused by order{f' for {took}' if took else ''}{'' if ended else f', {UNFINISHED}'}"
        )
    named = [f"rank {rank} ({cause})" for rank, cause in list(faults.items())[:MOST_RANKS]]
    if more := len(faults) - len(named):
        named.append(f"{more} more rank{'s' * (more > 1)}")
    ranks = ", ".join(named)
    if not ended:
        return f"{ranks} -> {last['strategy'] or 'recovery'}: {UNFINISHED}"
    why = f": {last['because']}" if last["outcome"] == RESTARTED and last.get("because") else ""
    answer = f"{last['strategy'] or 'no strategy'}: {last['outcome']}"
    return f"{ranks} -> {answer}{f' in {took}' if took else ''}{why}"


def _cause(fault: dict[str, Any]) -> str:
    """How a rank failed, in a few words."""
    match fault["kind"]:
        case FaultCause.EXITED if evidence := fault.get("evidence"):
            return fault_line(evidence)[:MOST_TEXT]
        case FaultCause.NAMED:
            return "reported"
        case kind:
            return str(kind)
