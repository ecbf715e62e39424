"""The survivors of a loss write one complete checkpoint; the next start resumes from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import scripts
from tests.integration.torch.runs import assert_same, ends, lose_and_checkpoint, run
from tests.integration.torch.world import Script, World

STEPS = 8


Calm = Callable[[Script], list[Any]]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The result of a script without faults."""

    @cache
    def end(script: Script) -> list[Any]:
        return ends(run(tmp_path_factory.mktemp("calm") / "run", script, steps=STEPS))

    return end


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        (scripts.ddp, "in backward"),
        (scripts.everything, "in forward"),
        (scripts.hsdp, "in backward"),
        (scripts.hsdp, "after backward"),
        (scripts.fsdp, "in backward"),
        (scripts.fsdp, "in the optimizer"),  # the survivors are a step ahead of the copy
    ],
)
def test_next_start_resumes_from_the_emergency_checkpoint(
    script: Script, moment: str, calm: Calm, tmp_path: Path
) -> None:
    lost = lose_and_checkpoint(tmp_path / "lost", script, (1, 0, 4, moment), steps=STEPS)
    assert [report.because for report in lost.dumped.values()] == [""] * 3
    assert list((tmp_path / "dump").glob("step-*/taskd.json"))
    resumed = run(tmp_path / "resumed", script, steps=STEPS)
    assert_same(calm(script), resumed)
    assert not list((tmp_path / "dump").glob("step-*/taskd.json")), "it must not be used again"


def test_shards_of_a_lost_node_are_written_from_the_buddies_copies(
    calm: Calm, tmp_path: Path
) -> None:
    kills = [(rank, 0, 4, "in backward") for rank in (0, 1)]
    lost = lose_and_checkpoint(
        tmp_path / "lost",
        scripts.fsdp,
        *kills,
        ranks_per_node=2,
        then=lambda world: world.lose_node(0, to=2),
        steps=STEPS,
    )
    assert [report.because for report in lost.dumped.values()] == [""] * 2
    assert list((tmp_path / "dump").glob("step-*/taskd.json"))
    assert_same(calm(scripts.fsdp), run(tmp_path / "resumed", scripts.fsdp, steps=STEPS))


def damage(world: World) -> None:
    """Flip one bit in all copies of rank 1; their headers still look complete."""
    for copy in world.memory(0).glob("snapshot-1.*"):
        content = bytearray(copy.read_bytes())
        content[-1] ^= 1
        copy.write_bytes(content)


def test_missing_shard_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    kill = (1, 0, 4, "in the optimizer")
    lost = lose_and_checkpoint(tmp_path / "lost", scripts.fsdp, kill, then=damage, steps=STEPS)
    because = "no survivor has a copy of step 4 of rank 1"
    assert [report.because for report in lost.dumped.values()] == [because] * 3
    assert not (tmp_path / "dump").exists()


def test_checkpoint_of_another_model_is_not_used(tmp_path: Path) -> None:
    short: list[Any] = ends(run(tmp_path / "calm", scripts.ddp, steps=2))
    lose_and_checkpoint(tmp_path / "lost", scripts.everything, (1, 0, 4, "in forward"), steps=STEPS)
    assert_same(short, run(tmp_path / "other", scripts.ddp, steps=2))


def test_incomplete_checkpoint_is_not_used(tmp_path: Path) -> None:
    short: list[Any] = ends(run(tmp_path / "calm", scripts.ddp, steps=3))
    lose_and_checkpoint(tmp_path / "lost", scripts.ddp, (1, 0, 2, "in forward"), steps=STEPS)
    for info in (tmp_path / "dump").glob("step-*/taskd.json"):
        info.write_text("{")
    assert_same(short, run(tmp_path / "next", scripts.ddp, steps=3))
