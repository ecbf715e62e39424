"""What the manager believes: everybody speaks for himself, and in numbers that can be.

The bus makes sure that a message comes from the place that it names (`core/bus/relay.py`,
`bus/admission.py`). Here its content is held against that place, so that a worker that has gone
mad, or whoever took its token, can neither report another rank dead nor end the job. Asked by
`manager/sense.py` before anything is made of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from functools import cache
from math import isfinite
from typing import Any, get_args, get_type_hints

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
_WITHIN: dict[Any, range] = {
    Rank: range(MOST_RANKS),
    NodeRank: range(MOST_RANKS),
    Step: range(-1, 2**63),
    Incident: range(-1, 2**63),
}
_OTHERS = range(-(2**31), 2**31)
"""What the services of clusterd can carry."""


def problem_in(src: Position, body: Body) -> str:
    """What is wrong with these words from there; empty when they may be believed."""
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
            return f"it speaks for rank {rank}"
        case AgentHello(node=node) | WorkersStarted(node=node) if (
            src.role,
            src.server_rank,
        ) != (Role.AGENT, str(node)):
            return f"it speaks for node {node}"
        case NodeHeartbeat(node=node) if (
            # The proxy of a node lives in its agent's process, and its heart beats for both.
            src.role not in (Role.AGENT, Role.PROXY) or src.server_rank != str(node)
        ):
            return f"it speaks for node {node}"
        case WorkerExited() | RestartsLeft() | RanksFailed() | EndJob() if src.role != Role.AGENT:
            return "only an agent may say that"
        case _:
            return _absurd(type(body), body)


def _absurd(hint: Any, value: object) -> str:
    """The first number that cannot be, by name."""
    if isinstance(value, bool | str):
        return ""
    if isinstance(value, int):
        # A range looks at each of its numbers for anything but a plain one, such as a flag.
        return "" if int(value) in _WITHIN.get(hint, _OTHERS) else f"{value} is out of range"
    if isinstance(value, float):
        return "" if isfinite(value) else f"{value} is no number"
    if isinstance(value, Sequence):
        inner = get_args(hint)[0]
        return next(filter(None, (_absurd(inner, item) for item in value)), "")
    if is_dataclass(value) and not isinstance(value, type):
        for name, kind in _hints(type(value)).items():
            if problem := _absurd(kind, getattr(value, name)):
                return problem if ":" in problem else f"{name}: {problem}"
    return ""


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
