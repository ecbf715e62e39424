"""The job shrinks around a lost rank and grows back; every sample of every step is used once."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.integration import torch_scripts as scripts
from tests.integration.torch_runs import ends, run
from tests.integration.torch_world import World

STEPS = 40


@pytest.mark.parametrize("lost", [(2,), (0,), (1, 3)])
def test_shrink_and_grow_back(lost: tuple[int, ...], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kills = [(rank, 0, 5, "in forward") for rank in lost]
    told = {"steps": STEPS, "kills": kills, "pace_s": 0.05}
    world = World(scripts.elastic, folder, told=told)

    async def live() -> None:
        try:
            await world.start()
            await world.until(lambda: world.dead == set(lost), "the loss", world.run_s)
            await world.shrink()
            assert len(world.committed) == 4 - len(lost)
            await world.grow()
            await world.until(lambda: len(world.done) == 4, "the end", world.run_s)
        finally:
            await world.stop()

    asyncio.run(live())
    used = Counter(
        line for rank in range(4) for line in (folder / f"used-{rank}").read_text().splitlines()
    )
    assert used == Counter(f"{step} {part}" for step in range(STEPS) for part in range(4))
    ended = ends(world)
    calm = ends(run(tmp_path / "calm", scripts.elastic, steps=STEPS))
    for name, tensor in calm[0]["model"].items():
        for rank in range(4):
            assert torch.equal(ended[0]["model"][name], ended[rank]["model"][name])
        # The same batches, summed in another order: the same training up to rounding.
        assert torch.allclose(tensor, ended[0]["model"][name], rtol=1e-3, atol=1e-5), name
