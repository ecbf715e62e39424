"""A snapshot is damaged and its rank dies: the snapshot is refused, and the next source is used.

The rank flips a bit in chosen files when its newest snapshot is complete, and then dies.
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
from taskd.torch.copies import snapshot_file
from taskd.torch.state.sealed import DIGEST
from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.world import PATIENCE_S, World

STEPS = 8
LOST, AT = Rank(1), 5
"""The rank that dies, and the step that it dies in."""
IN_A_TENSOR = -2
IN_ITS_MANIFEST = snapshot_file.HEAD + 8 + DIGEST + 40


def damaged_fsdp(args: dict[str, Any]) -> None:
    """`damage` lists files by node, name and step, and the place where a bit is flipped."""
    inject_fault = scripts.inject_fault
    os.environ["TASKD_ENCRYPT_STATE"] = "on" if args["encrypted"] else "off"

    def damaging(args: dict[str, Any], step: Any, moment: str) -> None:
        if (args["rank"], args["incarnation"], int(step), moment) in args["kills"]:
            step._cycle.context.copies.wait()
            for node, name, of_step, place in args["damage"]:
                _flip(_copy(Path(args["folder"]) / f"node-{node}", name, of_step), place)
        inject_fault(args, step, moment)

    scripts.inject_fault = damaging
    scripts.fsdp(args)


def _copy(memory: Path, name: str, step: int) -> Path:
    """The buddy may still be receiving it."""
    deadline = monotonic() + PATIENCE_S
    while monotonic() < deadline:
        for path in memory.glob(f"snapshot-{name}.[01]"):
            found = snapshot_file.inspect(path)
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


def damage(
    folder: Path, ranks_per_node: int, *files: tuple[int, str, int, int], encrypted: bool = False
) -> World:
    """One rank dies before any rank can have finished the step, and these files are damaged."""
    kills = [(LOST, 0, AT, "after backward")]
    return run(
        folder,
        damaged_fsdp,
        ranks_per_node=ranks_per_node,
        steps=STEPS,
        kills=kills,
        damage=files,
        encrypted=encrypted,
    )


def plans(world: World) -> list[tuple[int, int]]:
    """The step of each plan, and the node that the lost rank's shard came from.

    A replacement that was given a damaged one may find the next by itself. A plan may be made a
    second time, when ranks have said what lies on their node before one of them refused it.
    """
    made = ((plan.resume, world.nodes[plan.sources.get(LOST, LOST)]) for plan in world.plans)
    return [plan for plan, _ in groupby(made)]


@pytest.mark.parametrize("place", [IN_A_TENSOR, IN_ITS_MANIFEST])
def test_the_copy_before_it_is_used(place: int, calm: list[Any], tmp_path: Path) -> None:
    """One node: all ranks go back one step."""
    world = damage(tmp_path / "run", 4, (0, "1", AT, place))
    assert plans(world) == [(AT, 0), (AT - 1, 0)]
    assert_same(calm, world)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_buddys_copy_is_used(calm: list[Any], tmp_path: Path, encrypted: bool) -> None:
    """Two nodes: no step is lost."""
    world = damage(tmp_path / "run", 2, (0, "1", AT, IN_A_TENSOR), encrypted=encrypted)
    assert plans(world) == [(AT, 0), (AT, 1)]
    assert_same(calm, world)


def test_sources_are_used_one_after_the_other(calm: list[Any], tmp_path: Path) -> None:
    """Both copies are damaged, and one that a survivor needs to return to the step before."""
    world = damage(
        tmp_path / "run",
        2,
        (0, "1", AT, IN_A_TENSOR),
        (1, "1.kept", AT, IN_ITS_MANIFEST),
        (1, "2", AT - 1, IN_A_TENSOR),
    )
    assert plans(world) == [(AT, 0), (AT, 1), (AT - 1, 0)]
    assert 2 in world.plans[-1].sources
    assert_same(calm, world)
