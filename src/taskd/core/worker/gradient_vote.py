"""Which rank has computed a wrong gradient: decided from what its peers get for the same batch.

In a check (`torch/verify/verification.py`) every rank computes the gradients of its own batch and
then those of another rank's batch. The two results of a batch must be equal in every bit. If they
are not, a third rank computes that batch as well, and the rank that disagrees with both others is
named. All ranks see the same numbers and come to the same verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from taskd.model.ids import Rank

FEWEST = 3
"""With fewer ranks no third one could settle a difference."""


@dataclass(frozen=True, slots=True)
class GradientVerdict:
    named: tuple[Rank, ...] = ()
    """The ranks that have computed a wrong gradient."""
    because: str = ""
    """Why they are named."""
    doubt: str = ""
    """Why the check says nothing about any rank, and would not next time either; empty: it does."""


def checkers(ranks: Sequence[Rank], turn: int) -> dict[Rank, Rank]:
    """Which rank computes the batch of which other one, in this check.

    Each computes one more batch than its own. The pairs change from one check to the next.
    """
    ranks = sorted(ranks)
    shift = 1 + turn % (len(ranks) - 1)
    return {rank: ranks[(at + shift) % len(ranks)] for at, rank in enumerate(ranks)}


def disputed(own: Mapping[Rank, int], second: Mapping[Rank, int]) -> tuple[Rank, ...]:
    """The ranks whose batch has given two results. `second`: the checker's result, by the rank
    whose batch it is."""
    return tuple(rank for rank in sorted(own) if own[rank] != second[rank])


def referees(disputes: Sequence[Rank], checked_by: Mapping[Rank, Rank]) -> dict[Rank, Rank]:
    """The third rank for each disputed batch: if possible, one that is in no dispute itself."""
    suspects = {*disputes, *(checked_by[rank] for rank in disputes)}
    batches: Counter[Rank] = Counter()
    chosen: dict[Rank, Rank] = {}
    for rank in disputes:
        able = [one for one in checked_by if one not in (rank, checked_by[rank])]
        third = min(able, key=lambda one: (one in suspects, batches[one], one))
        batches[third] += 1
        chosen[rank] = third
    return chosen


def settle(
    own: Mapping[Rank, int],
    second: Mapping[Rank, int],
    third: Mapping[Rank, int],
    checked_by: Mapping[Rank, Rank],
) -> GradientVerdict:
    """`third` has the results of the referees, by the rank whose batch it is."""
    referee = referees(disputed(own, second), checked_by)
    wrong: set[Rank] = set()
    reasons: list[str] = []
    for rank, judge in referee.items():
        checker = checked_by[rank]
        if third[rank] == own[rank]:
            named, right = checker, (rank, judge)
        elif third[rank] == second[rank]:
            named, right = rank, (checker, judge)
        else:
            everyone = ", ".join(map(str, sorted((rank, checker, judge))))
            return GradientVerdict(
                doubt=f"ranks {everyone} have three different gradients for the batch of rank "
                f"{rank}"
            )
        wrong.add(named)
        reasons.append(
            f"the gradients that rank {named} has computed for the batch of rank {rank} differ "
            f"from those of ranks {right[0]} and {right[1]}"
        )
    if 2 * len(wrong) >= len(own):
        return GradientVerdict(
            doubt=f"{len(wrong)} of {len(own)} ranks disagree with two others: devices do not fail "
            "together"
        )
    return GradientVerdict(tuple(sorted(wrong)), "; ".join(reasons))
