"""Goodput: time in committed steps divided by uptime."""

from __future__ import annotations

import pytest

from taskd.core.manager.watch.goodput import Goodput


def test_steady_steps_give_full_goodput() -> None:
    good = Goodput(0.0)
    for step in range(1, 101):
        good = good.at(step, float(step))
    assert good.share(100.0) == pytest.approx(0.99)
    assert good.steps_per_s == pytest.approx(1.0)


def test_pause_is_lost_time_but_its_step_counts_once() -> None:
    good = Goodput(0.0)
    for step in range(1, 51):
        good = good.at(step, float(step))
    good = good.at(51, 101.0)
    assert good.productive_s == pytest.approx(50.0)
    assert good.steps == 50


def test_start_of_the_job_does_not_count_as_work() -> None:
    good = Goodput(0.0).at(0, 1.0).at(1, 31.0).at(2, 32.0)
    assert good.productive_s == pytest.approx(1.0)


def test_repeated_or_older_steps_change_nothing() -> None:
    good = Goodput(0.0).at(5, 1.0).at(6, 2.0)
    assert good.at(6, 9.0) is good
    assert good.at(3, 9.0) is good
