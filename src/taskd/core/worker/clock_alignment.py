"""Clock offsets between ranks, computed from their common collectives.

No rank can leave a collective before all ranks have entered it. So for each collective that two
ranks share, the end on one rank is later than the start on the other, whatever their clocks show;
every such pair limits how much the clocks can differ. An offset that may be zero is taken as zero:
ranks of one machine share a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median

Spans = Mapping[Hashable, tuple[int, int]]
"""Start and end of each collective, by a name that is the same on all its ranks."""


@dataclass(frozen=True, slots=True)
class Offset:
    """Subtract `ns` from a rank's times."""

    ns: int
    within_ns: int
    """The largest possible error; -1: unknown."""


UNKNOWN = Offset(0, -1)


def offsets(ranks: Mapping[int, Spans]) -> dict[int, Offset]:
    """Offsets relative to the lowest rank; via other ranks where two share no collective."""
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
    """How far the second clock is ahead of the first. None: no common collective."""
    shared = [(mine[key], yours[key]) for key in mine.keys() & yours.keys()]
    if not shared:
        return None
    least = max(your[0] - my[1] for my, your in shared)
    most = min(your[1] - my[0] for my, your in shared)
    if least > most:
        # A clock was set in between: the ends are the best estimate.
        return Offset(int(median(your[1] - my[1] for my, your in shared)), least - most)
    if least <= 0 <= most:
        return Offset(0, max(-least, most))
    return Offset((least + most) // 2, (most - least + 1) // 2)
