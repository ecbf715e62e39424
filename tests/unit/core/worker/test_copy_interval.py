"""After how many steps the state is copied."""

from __future__ import annotations

import pytest

from taskd.core.worker import copy_interval
from taskd.core.worker.copy_interval import LONGEST, SHARE


@pytest.mark.parametrize(
    ("step_s", "cost_s", "interval"),
    [
        (0.144, 0.0, 1),
        (0.144, 0.007, 1),
        (0.144, 0.008, 2),
        (0.144, 0.150, 32),
        (10.0, 0.4, 1),
        (0.001, 10.0, LONGEST),
        (0.0, 1.0, LONGEST),
        (0.0, 0.0, 1),
    ],
)
def test_interval_follows_from_the_cost_of_a_copy(
    step_s: float, cost_s: float, interval: int
) -> None:
    assert copy_interval.propose(step_s, cost_s) == interval


def test_copies_cost_at_most_the_share_and_not_much_less() -> None:
    for cost_ms in range(1, 3000, 7):
        step_s, cost_s = 0.1, cost_ms / 1000
        interval = copy_interval.propose(step_s, cost_s)
        if interval < LONGEST:
            assert cost_s / interval <= SHARE * step_s
        if interval > 1:
            assert 2 * cost_s / interval > SHARE * step_s


def test_all_ranks_use_the_longest_interval_that_one_needs() -> None:
    assert copy_interval.agree(1, [1, 4, 2]) == 4
    assert copy_interval.agree(8, [1, 2, 1]) == 2


def test_ranks_without_measurements_change_nothing() -> None:
    assert copy_interval.agree(8, [0, 0]) == 8
    assert copy_interval.agree(1, [0, 16]) == 16
    assert copy_interval.agree(4, []) == 4


def test_interval_does_not_go_back_and_forth() -> None:
    """What a copy costs varies from one measurement to the next."""
    assert copy_interval.agree(8, [4, 4]) == 8
    assert copy_interval.agree(8, [2, 2]) == 2
