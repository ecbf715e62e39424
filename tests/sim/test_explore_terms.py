"""All interleavings of the leaders of one job, and proof that the search would notice a bug."""

from __future__ import annotations

import pytest

from tests.sim.explore_terms import Rules, TermsExplorer, real_fence


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("candidates", "faults", "terms"),
    [(2, 2, 3), (3, 1, 3), (3, 2, 3), pytest.param(3, 3, 4, marks=pytest.mark.explore)],
    ids=str,
)
def test_no_former_leader_acts(candidates: int, faults: int, terms: int) -> None:
    explorer = TermsExplorer(candidates, faults, terms)
    assert explorer.run() > 200
    assert {"epoch 1 decides", "epoch 2 decides", "an old order is refused"} <= explorer.endings


def test_reduced_search_leaves_no_state_out() -> None:
    full = TermsExplorer(2, 2, reduced=False)
    reduced = TermsExplorer(2, 2)
    assert full.run() > 5 * reduced.run()
    assert set(map(reduced.canonical, full.visited)) == reduced.visited
    assert full.endings == reduced.endings


def open_fence(before: int, epoch: int) -> tuple[bool, int]:
    return True, max(before, epoch)


@pytest.mark.parametrize("reduced", [False, True], ids=["all states", "reduced"])
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
def test_planted_bug_is_found(planted: Rules, found: str, reduced: bool) -> None:
    with pytest.raises(AssertionError, match=found):
        TermsExplorer(2, 2, rules=planted, reduced=reduced).run()
