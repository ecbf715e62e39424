"""All interleavings of the leaders of one job, and proof that the search would notice a bug."""

from __future__ import annotations

import pytest

from tests.sim.explore_terms import Rules, TermsExplorer, real_fence


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("candidates", "faults"),
    [(2, 2), (3, 1), pytest.param(3, 2, marks=pytest.mark.explore)],
    ids=str,
)
def test_no_former_leader_acts(candidates: int, faults: int) -> None:
    explorer = TermsExplorer(candidates, faults)
    assert explorer.run() > 1_000
    assert {"epoch 1 decides", "epoch 2 decides", "an old order is refused"} <= explorer.endings


def open_fence(before: int, epoch: int) -> tuple[bool, int]:
    return True, max(before, epoch)


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        (Rules(open_fence), "obeys epoch"),
        (Rules(real_fence, checks_lease=False), "writes after epoch"),
        (Rules(real_fence, waits_for_agents=False), "obeys epoch"),
        (Rules(real_fence, stops_in_time=False), "two leaders may act"),
    ],
    ids=["no fence", "writes without the lease", "decides too early", "stops too late"],
)
def test_planted_bug_is_found(planted: Rules, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        TermsExplorer(2, 2, rules=planted).run()
