"""The job shrinks after a loss and grows back; every sample of every step is used once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch import scripts
from tests.integration.torch.runs import ends, run
from tests.integration.torch.world import World

STEPS = 40


@pytest.mark.shows("DDP", "shrink and grow")
@pytest.mark.parametrize("lost", [(2,), (0,), (1, 3)])
def test_every_sample_is_used_once_while_ranks_are_missing(
    lost: tuple[int, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    kills = [(rank, 0, 5, "in forward") for rank in lost]
    args = {"steps": STEPS, "kills": kills, "pace_s": 0.05}
    world = World(scripts.elastic, folder, args=args)

    async def scenario() -> None:
        try:
            await world.start()
            await world.until(lambda: world.dead == set(lost), "the loss", world.run_s)
            await world.shrink()
            assert len(world.committed) == 4 - len(lost)
            await world.grow()
            await world.until(lambda: len(world.done) == 4, "the end", world.run_s)
        finally:
            await world.stop()

    asyncio.run(scenario())
    used = Counter(
        line for rank in range(4) for line in (folder / f"used-{rank}").read_text().splitlines()
    )
    assert used == Counter(f"{step} {part}" for step in range(STEPS) for part in range(4))
    ended = ends(world)
    calm = ends(run(tmp_path / "calm", scripts.elastic, steps=STEPS))
    for name, tensor in calm[0]["model"].items():
        for rank in range(4):
            assert torch.equal(ended[0]["model"][name], ended[rank]["model"][name])
        # The same batches summed in another order: equal up to rounding.
        assert torch.allclose(tensor, ended[0]["model"][name], rtol=1e-3, atol=1e-5), name


def with_a_late_group(args: dict[str, Any]) -> None:
    """When a rank is lost, two of the others create a group, by the rank numbers of that time."""
    job = taskd.init()
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    pair, sums = None, []
    for step in job.steps(args["steps"]):
        if pair is None and len(job.members) == 3:
            pair = dist.new_group([0, 1])
        number = torch.tensor([float(args["rank"])])
        with step:
            scripts.inject_fault(args, step, "in forward")
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.ones(4)).square().mean())
            if pair is not None and job.rank in (1, 2):
                dist.all_reduce(number, group=pair)
            optimizer.step()
        if job.step > step and pair is not None:
            sums.append(int(number))
        threading.Event().wait(args["pace_s"])
    (Path(args["folder"]) / f"sums-{args['rank']}").write_text(" ".join(map(str, set(sums))))


def test_group_created_while_ranks_are_missing_survives_the_next_incident(tmp_path: Path) -> None:
    args = {"steps": STEPS, "kills": [(0, 0, 3, "in forward")], "pace_s": 0.05}
    world = World(with_a_late_group, tmp_path, args=args)

    async def scenario() -> None:
        try:
            await world.start()
            await world.until(lambda: world.dead == {0}, "the loss", world.run_s)
            await world.shrink()
            await world.recover()
            await world.until(lambda: len(world.done) == 3, "the end", world.run_s)
        finally:
            await world.stop()

    asyncio.run(scenario())
    sums = [(tmp_path / f"sums-{rank}").read_text() for rank in (1, 2, 3)]
    assert sums == ["3", "3", "3"], "1 + 2, and rank 3 by itself"
