"""State that differs between ranks comes back to its own rank, in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import own_state
from tests.integration.torch.runs import assert_same, ends, lose_and_checkpoint, run
from tests.integration.torch.world import Script

STEPS = 12


def check(
    tmp_path: Path, script: Script, kills: list[tuple[int, int, int, str]], **args: Any
) -> None:
    calm = ends(run(tmp_path / "calm", script, steps=STEPS, **args))
    assert_same(calm, run(tmp_path / "hurt", script, steps=STEPS, kills=kills, **args))


@pytest.mark.parametrize("late", [False, True])
def test_objects_of_a_rank_come_back_to_it(tmp_path: Path, late: bool) -> None:
    kills = [
        (1, 0, 3, "in forward"),
        (2, 0, 5, "after backward"),
        (0, 0, 7, "after the update"),
        (1, 1, 9, "between steps"),
    ]
    check(tmp_path, own_state.own_objects, kills, late=late)


@pytest.mark.parametrize("sharded", [False, True])
def test_what_changes_between_steps_is_part_of_the_state(tmp_path: Path, sharded: bool) -> None:
    kills = [
        (1, 0, 2, "in forward"),
        (2, 0, 4, "after backward"),
        (0, 0, 5, "before the next step"),
        (3, 0, 7, "between steps"),
        (1, 1, 9, "updated"),
    ]
    check(tmp_path, own_state.changed_between_steps, kills, sharded=sharded)


def test_weights_that_a_forward_pass_changes_are_brought_back(tmp_path: Path) -> None:
    kills = [
        (1, 0, 3, "in forward"),
        (2, 0, 5, "after backward"),
        (0, 0, 7, "after the update"),
        (1, 1, 9, "in forward"),
    ]
    check(tmp_path, own_state.momentum_encoder, kills, size=3, ranks_per_node=3)


def test_loader_is_not_read_twice_by_a_replacement(tmp_path: Path) -> None:
    kills = [(1, 0, 3, "between steps"), (0, 0, 6, "between steps")]
    check(tmp_path, own_state.read_before_the_step, kills, size=2, ranks_per_node=2)


@pytest.mark.shows(
    "expert parallelism: experts that differ by rank, all-to-all",
    "lost rank",
    "yes, from snapshots",
)
@pytest.mark.parametrize("alike", [False, True])
def test_experts_come_back_to_their_rank(tmp_path: Path, alike: bool) -> None:
    kills = [
        (1, 0, 3, "in forward"),
        (2, 0, 5, "after backward"),
        (0, 0, 7, "after the update"),
        (3, 0, 8, "updated"),
        (1, 1, 10, "after backward"),
    ]
    check(tmp_path, own_state.experts, kills, alike=alike)


def test_gradients_of_earlier_steps_are_not_lost(tmp_path: Path) -> None:
    kills = [(1, 0, 2, "in forward"), (2, 0, 6, "after backward"), (0, 0, 9, "in forward")]
    check(tmp_path, own_state.accumulated, kills)


def test_step_without_an_update_is_finished_where_the_lost_rank_has_copied_its_own(
    tmp_path: Path,
) -> None:
    """The others are at the end of the step, too: the first plan counts on them, and holds."""
    calm = ends(run(tmp_path / "calm", own_state.accumulated, steps=STEPS, size=2))
    kills = [(1, 0, 5, "before the comparison")]
    world = run(tmp_path / "hurt", own_state.accumulated, steps=STEPS, size=2, kills=kills)
    assert_same(calm, world)
    assert world.plans[0].resume == 6
    assert world.incident == 1


def test_error_feedback_of_a_communication_hook_comes_back_to_its_rank(tmp_path: Path) -> None:
    kills = [(1, 0, 4, "in forward"), (0, 0, 7, "after backward")]
    check(tmp_path, own_state.compressed, kills, size=2)


def test_buffers_that_are_not_exchanged_come_back_to_their_rank(tmp_path: Path) -> None:
    check(tmp_path, own_state.buffers, [(1, 0, 3, "in forward"), (2, 0, 5, "after backward")])


@pytest.mark.parametrize(
    "script",
    [
        own_state.experts,
        own_state.own_objects,
        own_state.accumulated,
        own_state.sharded_objects,
    ],
)
def test_emergency_checkpoint_has_the_state_of_every_rank(tmp_path: Path, script: Script) -> None:
    calm = ends(run(tmp_path / "calm", script, steps=STEPS))
    kill = (1, 0, 6, "in forward")
    lost = lose_and_checkpoint(tmp_path / "lost", script, kill, steps=STEPS)
    assert [report.because for report in lost.dumped.values()] == [""] * 3
    assert_same(calm, run(tmp_path / "resumed", script, steps=STEPS))


@pytest.mark.shows(
    "pipelines (`torch.distributed.pipelining`: GPipe, 1F1B), alone and with DDP",
    "lost rank",
    "yes, from snapshots",
)
@pytest.mark.parametrize(("schedule", "ddp"), [("gpipe", True), ("1f1b", False)])
def test_stages_of_a_pipeline_come_back_to_their_rank(
    tmp_path: Path, schedule: str, ddp: bool
) -> None:
    kills = [
        (1, 0, 3, "in forward"),
        (2, 0, 5, "after backward"),
        (0, 0, 7, "after the update"),
        (3, 0, 8, "updated"),
    ]
    check(tmp_path, own_state.pipeline, kills, schedule=schedule, ddp=ddp)


def test_gradients_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    for end in ends(run(tmp_path / "run", own_state.unreduced, size=2, ranks_per_node=2)):
        assert "FSDP2 has not reduced" in end["refused"]


@pytest.mark.parametrize(
    ("drift", "size", "drifter", "kill", "has_own"),
    [
        ("weights", 2, 0, (1, 0, 7, "in forward"), False),
        ("weights", 3, 1, (1, 0, 7, "in forward"), False),
        ("weights", 3, 2, (1, 0, 7, "in forward"), False),
        ("buffers", 2, 1, (1, 0, 7, "after backward"), False),
        ("part", 2, 0, (1, 0, 5, "after the update"), False),
        ("part", 2, 0, (1, 0, 5, "after the update"), True),
    ],
)
def test_state_that_has_become_different_is_not_given_to_a_replacement(
    tmp_path: Path,
    drift: str,
    size: int,
    drifter: int,
    kill: tuple[int, int, int, str],
    has_own: bool,
) -> None:
    """The manager then restarts all ranks from the script's checkpoint.

    `has_own`: the ranks make copies of another part, of which each has its own.
    """
    with pytest.raises(AssertionError, match="Impossible") as refused:
        run(
            tmp_path / "run", own_state.drifting, steps=STEPS, size=size, ranks_per_node=size,
            drift=drift, drifter=drifter, has_own=has_own, kills=[kill],
        )  # fmt: skip
    assert "become different since the ranks last compared" in str(refused.value)
