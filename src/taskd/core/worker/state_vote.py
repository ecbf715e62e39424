"""Whose state is wrong, when ranks that should hold the same bits do not.

The ranks compare fingerprints every so many steps (`torch/guard.py`). Each of them sees all and
judges for itself; same numbers, same verdict. More than half of a shard's holders are right: that
two of them are wrong in the same way does not happen. Without such a majority nobody knows who is
right, and none of them is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from taskd.model.ids import Rank

SHOWN = 8
"""So many ranks are listed in a sentence."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one rank says of itself."""

    shard: int
    """Ranks with the same number should hold the same state."""
    state: int
    agreed: int
    """The last step at which it knows that all agreed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    named: tuple[Rank, ...]
    """Whose state is not to be used; none: all agree."""
    agreed: int
    """The last step at which all agreed before."""
    because: str


def judge(prints: Mapping[Rank, Fingerprint]) -> Verdict:
    named: list[Rank] = []
    reasons: list[str] = []
    for shard in sorted({one.shard for one in prints.values()}):
        holders = {rank: one.state for rank, one in prints.items() if one.shard == shard}
        (common, votes), *_ = Counter(holders.values()).most_common(1)
        if votes == len(holders):
            continue
        if 2 * votes > len(holders):
            odd = [rank for rank, state in holders.items() if state != common]
            even = [rank for rank in holders if rank not in odd]
            reasons.append(f"the state of {_listed(odd)} differs from that of {_listed(even)}")
        else:
            odd = list(holders)
            reasons.append(f"the states of {_listed(odd)} differ, and none has a majority")
        named += odd
    agreed = max(one.agreed for one in prints.values())
    return Verdict(tuple(sorted(named)), agreed, "; ".join(reasons))


def _listed(ranks: list[Rank]) -> str:
    ranks = sorted(ranks)
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"
