"""A copy in shared memory rots, and its rank dies: it is refused, and the next source is asked.

The rank itself flips a bit of chosen files when its newest copy is whole, and dies at once.
"""

from __future__ import annotations

import os
import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from taskd.model.ids import Rank
from taskd.runtime.clock import monotonic
from taskd.torch.copies import snapshot_file as page
from taskd.torch.state.sealed import DIGEST
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import PATIENCE_S, World

STEPS = 8
LOST, AT = Rank(1), 5
"""The rank that dies, and the step that it dies in."""
IN_A_TENSOR = -2
IN_ITS_MANIFEST = page.HEAD + 8 + DIGEST + 40


def rotten_fsdp(told: dict[str, Any]) -> None:
    """`rot` names files by their node, rank and step, and says where in them a bit flips."""
    strike = scripts.strike

    def rotting(told: dict[str, Any], step: Any, moment: str) -> None:
        if (told["rank"], told["life"], int(step), moment) in told["kills"]:
            step._job._copying.wait()
            for node, name, of_step, place in told["rot"]:
                _flip(_copy(Path(told["folder"]) / f"node-{node}", name, of_step), place)
        strike(told, step, moment)

    scripts.strike = rotting
    scripts.fsdp(told)


def _copy(memory: Path, name: str, step: int) -> Path:
    """A buddy may still be about to put it in its place."""
    deadline = monotonic() + PATIENCE_S
    while monotonic() < deadline:
        for path in memory.glob(f"snapshot-{name}.[01]"):
            found = page.look(path)
            if found is not None and found.step == step:
                return path
        threading.Event().wait(0.01)
    raise AssertionError(f"no copy {name} of step {step} in {memory}")


def _flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return ends(run(tmp_path_factory.mktemp("calm") / "run", scripts.fsdp, steps=STEPS))


def rot(folder: Path, ranks_per_node: int, *files: tuple[int, str, int, int]) -> World:
    """One rank dies before anybody can have finished the step, and these files are damaged."""
    kills = [(LOST, 0, AT, "after backward")]
    return run(
        folder, rotten_fsdp, ranks_per_node=ranks_per_node, steps=STEPS, kills=kills, rot=files
    )


def plans(world: World) -> list[tuple[int, int]]:
    """Where each plan went on, and from which node the lost rank's shard came.

    A replacement that was given a damaged one may find the next by itself. A plan may be made a
    second time, when ranks have said what lies on their node before one of them refused it.
    """
    made = ((plan.resume, world.nodes[plan.sources.get(LOST, LOST)]) for plan in world.plans)
    return [plan for plan, _ in groupby(made)]


@pytest.mark.parametrize("place", [IN_A_TENSOR, IN_ITS_MANIFEST])
def test_the_copy_before_it_is_used(place: int, calm: list[Any], tmp_path: Path) -> None:
    """One node: everybody goes back a step."""
    world = rot(tmp_path / "run", 4, (0, "1", AT, place))
    assert plans(world) == [(AT, 0), (AT - 1, 0)]
    assert_same(calm, world)


def test_the_buddys_copy_is_used(calm: list[Any], tmp_path: Path) -> None:
    """Two nodes: no step is lost."""
    world = rot(tmp_path / "run", 2, (0, "1", AT, IN_A_TENSOR))
    assert plans(world) == [(AT, 0), (AT, 1)]
    assert_same(calm, world)


def test_one_source_after_the_other_is_used(calm: list[Any], tmp_path: Path) -> None:
    """Both copies are damaged; and one that a survivor needs to go back to the step before."""
    world = rot(
        tmp_path / "run",
        2,
        (0, "1", AT, IN_A_TENSOR),
        (1, "1.kept", AT, IN_ITS_MANIFEST),
        (1, "2", AT - 1, IN_A_TENSOR),
    )
    assert plans(world) == [(AT, 0), (AT, 1), (AT - 1, 0)]
    assert 2 in world.plans[-1].sources
    assert_same(calm, world)
