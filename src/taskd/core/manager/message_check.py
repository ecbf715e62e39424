"""Which messages the manager accepts: the sender may only report about itself, in valid numbers.

The bus guarantees that a message comes from the position that it names (`core/bus/relay.py`,
`bus/admission.py`). Here the content is compared with that position, so that a faulty worker, or
anyone with its token, can neither report another rank as dead nor end the job.
`manager/sense.py` checks every message before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from typing import Any, get_args, get_type_hints

from taskd.model.faults import FaultCause
from taskd.model.ids import Incident, NodeRank, Position, Rank, Role, Step
from taskd.model.messages import (
    AgentHello,
    Body,
    Committed,
    Dumped,
    EndJob,
    NodeHeartbeat,
    Parked,
    RanksFailed,
    Repaired,
    RepairFailed,
    RestartsLeft,
    WorkerExited,
    WorkerFailed,
    WorkerHello,
    WorkersStarted,
)

MOST_RANKS = 1_000_000
_LIMITS: dict[Any, range] = {
    Rank: range(MOST_RANKS),
    NodeRank: range(MOST_RANKS),
    Step: range(-1, 2**63),
    Incident: range(-1, 2**63),
}
MOST_TEXT = 16 << 10
"""Characters of a text that a worker describes itself with: it is published with the status."""
REPORTED = {
    FaultCause.COMMUNICATION,
    FaultCause.CORRUPT,
    FaultCause.MISCOMPUTED,
    FaultCause.EXCEPTION,
}
"""What a worker may report of itself. That it is dead, only others can know."""
_DEFAULT_LIMITS = range(-(2**31), 2**31)
"""The integers that clusterd's services can carry."""


def problem_in(src: Position, body: Body) -> str:
    """Why this message from this sender must be rejected; empty: it is accepted."""
    match body:
        case (
            WorkerHello(rank=rank)
            | WorkerFailed(rank=rank)
            | Parked(rank=rank)
            | Repaired(rank=rank)
            | RepairFailed(rank=rank)
            | Committed(rank=rank)
            | Dumped(rank=rank)
        ) if (src.role, src.process_rank) != (Role.WORKER, str(rank)):
            return f"the sender is not rank {rank}"
        case WorkerHello(node=node) if src.server_rank != str(node):
            return f"the sender is not on node {node}"
        case WorkerFailed(kind=kind) if kind not in REPORTED:
            return f"a worker cannot report a fault of kind {kind}"
        case WorkerHello() | Parked() if _longest_text(body) > MOST_TEXT:
            return f"a text has more than {MOST_TEXT} characters"
        case AgentHello(node=node) | WorkersStarted(node=node) if (
            src.role,
            src.server_rank,
        ) != (Role.AGENT, str(node)):
            return f"the sender is not node {node}"
        case NodeHeartbeat(node=node) if (
            # The proxy of a node runs in its agent's process and sends the heartbeat of both.
            src.role not in (Role.AGENT, Role.PROXY) or src.server_rank != str(node)
        ):
            return f"the sender is not node {node}"
        case WorkerExited() | RestartsLeft() | RanksFailed() | EndJob() if src.role != Role.AGENT:
            return "only an agent may send this"
        case _:
            return _invalid_number(type(body), body)


def _longest_text(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    inner: Sequence[object] = ()
    if isinstance(value, Sequence):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, name) for name in _hints(type(value))]
    return max(map(_longest_text, inner), default=0)


def _invalid_number(hint: Any, value: object) -> str:
    """The first number that is out of range, with the name of its field."""
    if isinstance(value, bool | str):
        return ""
    if isinstance(value, int):
        # `in range` is slow for subclasses of int, such as flags: it compares every number.
        return (
            "" if int(value) in _LIMITS.get(hint, _DEFAULT_LIMITS) else f"{value} is out of range"
        )
    if isinstance(value, float):
        return "" if isfinite(value) else f"{value} is not a finite number"
    if isinstance(value, Sequence):
        inner = get_args(hint)[0]
        return next(filter(None, (_invalid_number(inner, item) for item in value)), "")
    if is_dataclass(value) and not isinstance(value, type):
        for name, kind in _hints(type(value)).items():
            if problem := _invalid_number(kind, getattr(value, name)):
                return problem if ":" in problem else f"{name}: {problem}"
    return ""


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
