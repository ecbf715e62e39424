"""The manager's own account of a job, which it writes into its state directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SUMMARY = "summary.json"


def is_over(account: Path) -> bool:
    """Whether the manager has ended the job, and not only itself."""
    return _read(account).get("exit_code") is not None


def read_incidents(state_dir: str) -> list[str]:
    """One line an incident; empty when there is no account."""
    try:
        return [_incident(item) for item in _read(Path(state_dir) / SUMMARY)["incidents"]]
    except (KeyError, TypeError):
        return []


def _read(account: Path) -> dict[str, Any]:
    try:
        told = json.loads(account.read_text())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _incident(told: dict[str, Any]) -> str:
    faults = ", ".join(f"rank {fault['rank']} ({fault['kind']})" for fault in told["faults"])
    parts = told["parts_ms"]
    total = sum(parts.values())
    spent = ", ".join(f"{name} {ms:.0f}" for name, ms in parts.items())
    answer = f"{told['strategy'] or 'no strategy'}: {told['outcome'] or 'open'}"
    return f"  incident {told['incident']}: {faults} -> {answer} in {total:.0f} ms ({spent})"
