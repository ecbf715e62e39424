"""The manager's own account of a job, which it writes into its state directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"


def is_over(account: Path) -> bool:
    """Whether the manager has ended the job, and not only itself."""
    return _read(account).get("exit_code") is not None


@dataclass(frozen=True, slots=True)
class Incident:
    line: str
    fault: bool
    """False: the job stood still by order, for an operation or to grow."""


def read_incidents(state_dir: str) -> list[Incident]:
    """Empty when there is no account."""
    try:
        told = _read(Path(state_dir) / SUMMARY)["incidents"]
        return [Incident(_line(item), bool(item["faults"])) for item in told]
    except (KeyError, TypeError):
        return []


def count(incidents: list[Incident]) -> str:
    faults = sum(incident.fault for incident in incidents)
    pauses = len(incidents) - faults
    told = f"{faults} fault{'s' * (faults != 1)}"
    return f"{told}, {pauses} pause{'s' * (pauses != 1)} by order" if pauses else told


def _read(account: Path) -> dict[str, Any]:
    try:
        told = json.loads(account.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _line(told: dict[str, Any]) -> str:
    faults = ", ".join(f"rank {fault['rank']} ({fault['kind']})" for fault in told["faults"])
    faults = faults or "by order"
    parts = told["parts_ms"]
    total = sum(parts.values())
    spent = ", ".join(f"{name} {ms:.0f}" for name, ms in parts.items())
    answer = f"{told['strategy'] or 'no strategy'}: {told['outcome'] or 'open'}"
    return f"  incident {told['incident']}: {faults} -> {answer} in {total:.0f} ms ({spent})"
