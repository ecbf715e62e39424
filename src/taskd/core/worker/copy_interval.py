"""After how many steps the state is copied, so that copies make training at most 5 % slower.

Each rank measures what one copy adds to a step (`torch/copies/copy_costs.py`) and proposes an
interval when the ranks compare their state; all use the longest one that any rank has proposed.
Intervals are powers of two, so that measurements that vary a little lead to the same one.
"""

from __future__ import annotations

from collections.abc import Iterable

SHARE = 0.05
"""A step may get longer by this share, on average."""
LONGEST = 1024
"""In steps. If a rank is lost, at most so many steps are done again."""
NO_PROPOSAL = 0


def propose(step_s: float, cost_s: float) -> int:
    """The shortest interval that this rank can afford.

    `step_s`: how long a step takes without copies. `cost_s`: by how much one copy makes it longer.
    """
    interval = 1
    while interval < LONGEST and cost_s > SHARE * step_s * interval:
        interval *= 2
    return interval


def agree(before: int, proposals: Iterable[int]) -> int:
    """The interval of all ranks: the longest that any of them needs. `before`: the last one."""
    longest = max(proposals, default=NO_PROPOSAL)
    if longest == NO_PROPOSAL:
        return before
    if longest == before // 2:
        return before  # it would soon go up again
    return longest
