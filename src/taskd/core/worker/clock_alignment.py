"""One clock for all ranks, from the collectives they took part in together.

Nobody can end a collective before everybody has begun it. So of each collective that two ranks
share, each one's end is later than the other's start, whatever their clocks say; every such pair
narrows down by how much the clocks can differ. Clocks that need not differ at all are left alone:
ranks of one machine share one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median

Spans = Mapping[Hashable, tuple[int, int]]
"""Start and end of each collective, by a name that all its ranks give it."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Subtract `ns` from a rank's times."""

    ns: int
    within_ns: int
    """How far off that can be; -1 when nothing is known."""


UNKNOWN = Offset(0, -1)


def offsets(ranks: Mapping[int, Spans]) -> dict[int, Offset]:
    """Relative to the lowest rank; through others where two have nothing in common."""
    found: dict[int, Offset] = {}
    for root in sorted(ranks):
        if root in found:
            continue
        found[root] = Offset(0, 0) if not found else UNKNOWN
        waiting = deque([root])
        while waiting:
            known = waiting.popleft()
            for other in sorted(set(ranks) - set(found)):
                step = between(ranks[known], ranks[other])
                if step is not None:
                    base = found[known]
                    certain = base.within_ns >= 0
                    within = base.within_ns + step.within_ns if certain else -1
                    found[other] = Offset(base.ns + step.ns, within)
                    waiting.append(other)
    return found


def between(mine: Spans, yours: Spans) -> Offset | None:
    """By how much your clock is ahead of mine. None: we have nothing in common."""
    shared = [(mine[key], yours[key]) for key in mine.keys() & yours.keys()]
    if not shared:
        return None
    least = max(your[0] - my[1] for my, your in shared)
    most = min(your[1] - my[0] for my, your in shared)
    if least > most:
        # One clock was set in between: the ends are the best guess that is left.
        return Offset(int(median(your[1] - my[1] for my, your in shared)), least - most)
    if least <= 0 <= most:
        return Offset(0, max(-least, most))
    return Offset((least + most) // 2, (most - least + 1) // 2)
