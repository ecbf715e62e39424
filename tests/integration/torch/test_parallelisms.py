"""Ranks are lost under every kind of parallelism, and the result is the same in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import parallelisms
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import Script

STEPS = 6


def check(folder: Path, script: Script, size: int, **args: Any) -> None:
    kills = [(1, 0, 2, "in forward"), (0, 0, 3, "after backward"), (1, 1, 4, "after the update")]
    size_args = {"size": size, "ranks_per_node": size, "steps": STEPS, **args}
    calm = ends(run(folder / "calm", script, **size_args))
    world = run(folder / "killed", script, kills=kills, **size_args)
    assert sum(world.incarnations.values()) == len(kills), "survivors keep their processes"
    assert_same(calm, world)


@pytest.mark.shows("context parallelism (ring attention) with DDP", "lost rank")
def test_slices_of_a_sequence(tmp_path: Path) -> None:
    check(tmp_path, parallelisms.context_parallel, 2)


@pytest.mark.shows("pipelines with several stages per rank (interleaved, zero bubble)", "lost rank")
@pytest.mark.parametrize("schedule", ["ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble"])
def test_several_stages_per_rank(tmp_path: Path, schedule: str) -> None:
    check(tmp_path, parallelisms.interleaved, 2, schedule=schedule)


@pytest.mark.shows("tensor parallelism by hand: slices in plain modules", "lost rank")
def test_slices_in_plain_modules(tmp_path: Path) -> None:
    check(tmp_path, parallelisms.slices, 2)


@pytest.mark.shows("tensor parallelism (DTensor) alone", "lost rank")
def test_distributed_tensors_alone(tmp_path: Path) -> None:
    check(tmp_path, parallelisms.tensor_parallel, 2)


@pytest.mark.shows("three-dimensional mesh: HSDP with tensor parallelism inside", "lost rank")
def test_three_dimensional_mesh(tmp_path: Path) -> None:
    check(tmp_path, parallelisms.three_dimensions, 8)
