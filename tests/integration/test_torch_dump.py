"""The survivors of a loss write one complete checkpoint; the next start goes on from it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration import torch_scripts as scripts
from tests.integration.torch_runs import assert_same, ends, run
from tests.integration.torch_world import Script, World

STEPS = 8


def lose_and_dump(folder: Path, script: Script, kill: tuple[int, int, int, str]) -> World:
    folder.mkdir()
    world = World(script, folder, told={"steps": STEPS, "kills": [kill]})

    async def live() -> None:
        try:
            await world.start()
            await world.until(lambda: bool(world.dead), "a death", world.run_s)
            await world.dump()
        finally:
            await world.stop()

    asyncio.run(live())
    return world


@pytest.mark.parametrize(
    ("script", "moment"),
    [
        (scripts.ddp, "in backward"),
        (scripts.everything, "in forward"),
        (scripts.hsdp, "in backward"),
        (scripts.hsdp, "after backward"),
    ],
)
def test_the_next_start_goes_on_where_the_last_one_ended(
    script: Script, moment: str, tmp_path: Path
) -> None:
    calm = ends(run(tmp_path / "calm", script, steps=STEPS))
    lost = lose_and_dump(tmp_path / "lost", script, (1, 0, 4, moment))
    assert [told.because for told in lost.dumped.values()] == [""] * 3
    assert list((tmp_path / "dump").glob("step-*/taskd.json"))
    resumed = run(tmp_path / "resumed", script, steps=STEPS)
    assert_same(calm, resumed)
    assert not list((tmp_path / "dump").glob("step-*/taskd.json")), "it must not be used again"


def test_a_checkpoint_of_another_model_is_not_used(tmp_path: Path) -> None:
    calm: list[Any] = ends(run(tmp_path / "calm", scripts.ddp, steps=2))
    lose_and_dump(tmp_path / "lost", scripts.everything, (1, 0, 4, "in forward"))
    assert_same(calm, run(tmp_path / "other", scripts.ddp, steps=2))


def test_half_a_checkpoint_is_not_used(tmp_path: Path) -> None:
    calm: list[Any] = ends(run(tmp_path / "calm", scripts.ddp, steps=3))
    lose_and_dump(tmp_path / "lost", scripts.ddp, (1, 0, 2, "in forward"))
    for note in (tmp_path / "dump").glob("step-*/taskd.json"):
        note.write_text("{")
    assert_same(calm, run(tmp_path / "next", scripts.ddp, steps=3))
