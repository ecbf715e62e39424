"""Is there an order of all calls, each at one moment between its start and its end, that explains
what every call has returned? (Wing and Gong's search, for one register with compare-and-set.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Call:
    """A read has no `write`. Without an answer `end` is infinite: it may take effect later."""

    start: float
    end: float
    expected: int
    """Of a compare-and-set, the value that it replaces; of a read, what it returned."""
    write: int | None = None
    succeeded: bool | None = True
    """None: the answer was lost."""


def is_linearizable(history: Sequence[Call], first: int = 0) -> bool:
    calls = sorted(history, key=lambda call: call.start)
    done: set[tuple[frozenset[int], int]] = set()
    stack: list[tuple[frozenset[int], int]] = [(frozenset(range(len(calls))), first)]
    while stack:
        left, value = stack.pop()
        if all(calls[at].end == inf for at in left):
            return True
        if (left, value) in done:
            continue
        done.add((left, value))
        before = min(calls[at].end for at in left)
        for at in left:
            call = calls[at]
            if call.start <= before and (after := _apply(call, value)) is not None:
                stack.append((left - {at}, after))
    return False


def _apply(call: Call, value: int) -> int | None:
    """The value after the call; None: it cannot have returned this at that moment."""
    if call.write is None:
        return value if call.expected == value else None
    matches = call.expected == value
    if call.succeeded is None:
        return call.write if matches else value
    if call.succeeded != matches:
        return None
    return call.write if matches else value
