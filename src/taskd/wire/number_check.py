"""Numbers that a job's manager may report: those that every reader can show."""

from __future__ import annotations

from math import isfinite
from typing import Any

from google.protobuf.message import Message

from taskd.wire._pb import control_pb2 as pb
from taskd.wire.recover_codec import MAX_RANK

MOST_UNIX_MS = 253_402_300_800_000
"""The end of the year 9999: Python shows no later date."""
SINGLE = Message | str | bytes | int | float


def progress_problem(progress: pb.JobProgress) -> str:
    """Which number of it cannot be; empty if all can. Fast, because there may be many ranks."""
    wrong = [one.rank for one in progress.ranks if not 0 <= one.rank < MAX_RANK]
    if wrong:
        return f"invalid ranks: {wrong[:8]}"
    if not all(isfinite(one.idle_s) for one in progress.ranks):
        return "invalid number: idle_s of ranks"
    return number_problem(progress, but="ranks")


def number_problem(message: Message, but: str = "") -> str:
    """The same of any message, except for the field `but`."""
    for described, value in message.ListFields():
        name = described.name
        if name == but:
            continue
        values: list[Any] = [value] if isinstance(value, SINGLE) else list(value)
        for one in values:
            if isinstance(one, Message):
                if problem := number_problem(one):
                    return f"{problem} of {name}"
            elif isinstance(one, float) and not isfinite(one):
                return f"invalid number: {name}={one}"
            elif name.endswith("_unix_ms") and not 0 <= one < MOST_UNIX_MS:
                return f"invalid time: {name}={one}"
    return ""
