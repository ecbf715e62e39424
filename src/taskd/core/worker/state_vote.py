"""Which rank's state is corrupt when ranks that should hold the same bits differ.

The ranks compare fingerprints at regular steps (`guard.py`). Each rank sees all fingerprints
and decides by itself; the same numbers give the same verdict. If more than half of the holders of a
shard agree, they are right: two ranks are not corrupt in the same way. Without such a majority it
is unknown which rank is right, and none is trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from taskd.model.ids import Rank

SHOWN = 8
"""At most this many ranks are listed in a sentence."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one rank reports about its state."""

    shard: int
    """Ranks with the same number should hold the same state."""
    state: int
    agreed: int
    """The last step at which, as far as it knows, all ranks agreed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    named: tuple[Rank, ...]
    """The ranks whose state must not be used; empty: all agree."""
    agreed: int
    """The last step at which all ranks agreed."""
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
            differing = [rank for rank, state in holders.items() if state != common]
            agreeing = [rank for rank in holders if rank not in differing]
            reasons.append(
                f"the state of {_listed(differing)} differs from that of {_listed(agreeing)}"
            )
        else:
            differing = list(holders)
            reasons.append(f"the states of {_listed(differing)} differ, and none has a majority")
        named += differing
    agreed = max(one.agreed for one in prints.values())
    return Verdict(tuple(sorted(named)), agreed, "; ".join(reasons))


def _listed(ranks: list[Rank]) -> str:
    ranks = sorted(ranks)
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:SHOWN]))}{more}"
