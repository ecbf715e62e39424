from __future__ import annotations

import pytest

from taskd.manager.reports.job_status import PACE_S, Pace


def test_pace_is_steady_although_each_second_has_another_number_of_steps() -> None:
    pace, step = Pace(0.0, 0.0), 0
    seen = []
    for second in range(60):
        step += 19 if second % 2 else 11
        seen.append(pace.steps_per_s(step, float(second)))
    assert all(13.0 < each < 17.0 for each in seen[int(PACE_S) :]), seen


def test_steps_before_the_first_known_one_do_not_count() -> None:
    pace = Pace(0.0, 0.0)
    assert [pace.steps_per_s(0, at) for at in (1.0, 2.0)] == [0.0, 0.0]
    assert pace.steps_per_s(5_000, 3.0) == 0.0, "the job continues from a checkpoint"
    assert pace.steps_per_s(5_010, 4.0) == pytest.approx(10.0)
    assert pace.steps_per_s(4_000, 5.0) == 0.0, "all ranks were restarted"


def test_pace_falls_while_no_step_is_done() -> None:
    pace = Pace(0.0, 0.0)
    for second in range(10):
        pace.steps_per_s(10 * second + 1, float(second))
    assert pace.steps_per_s(91, 12.0) < 8.0
    assert pace.steps_per_s(91, 30.0) == 0.0


def test_pace_is_right_again_soon_after_a_long_pause() -> None:
    pace = Pace(0.0, 0.0)
    for at, step in ((1.0, 10), (2.0, 20), (62.0, 30)):
        pace.steps_per_s(step, at)
    assert pace.steps_per_s(40, 63.0) == pytest.approx(10.0)
