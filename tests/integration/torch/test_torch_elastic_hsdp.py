"""Sharded replicas: healthy ranks that share a replica with a lost rank leave with it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import taskd.torch as taskd
from taskd.torch.state.sharded import local
from tests.integration.torch.runs import ends, run
from tests.integration.torch.scripts import CLASSES, WIDTH, batch, inject_fault
from tests.integration.torch.world import World

STEPS = 20


def elastic_hsdp(args: dict[str, Any]) -> None:
    """FSDP2 with replicas that divide the parts of missing ranks; records which samples it used."""
    torch.manual_seed(5)
    job = taskd.init()
    mesh = DeviceMesh("cpu", args["mesh"], mesh_dim_names=("replicate", "shard"))
    net = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, CLASSES)
    )
    fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    job.protect(model=net, optimizer=optimizer)
    log = Path(args["folder"]) / f"used-{args['rank']}"
    for step in job.steps(args["steps"]):
        used = []
        with step:
            optimizer.zero_grad()
            for part in step.parts(net):
                data, target = batch(part, step)
                inject_fault(args, step, "in forward")
                loss = nn.functional.cross_entropy(net(data), target) * step.share
                torch.autograd.backward(loss)
                used.append(part)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            inject_fault(args, step, "after backward")
            optimizer.step()
        if job.step > step:
            with log.open("a") as file:
                file.writelines(f"{int(step)} {part}\n" for part in used)
        threading.Event().wait(args.get("pace_s", 0.0))
    end = {name: local(value).clone() for name, value in net.state_dict().items()}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.mark.shows(
    "HSDP (FSDP2 on a two-dimensional mesh)", "shrink and grow", "yes, by whole replicas"
)
@pytest.mark.parametrize(
    ("mesh", "lost", "moment", "leaving"),
    [
        ([[0, 1], [2, 3]], 3, "in forward", {2}),
        ([[0, 1], [2, 3]], 0, "after backward", {1}),
        ([[0, 3], [1, 4], [2, 5]], 3, "in forward", {0}),
    ],
)
def test_every_sample_is_used_once_while_a_replica_is_missing(
    mesh: list[list[int]], lost: int, moment: str, leaving: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    size = sum(map(len, mesh))
    args = {"steps": STEPS, "mesh": mesh, "kills": [(lost, 0, 5, moment)], "pace_s": 0.05}
    world = World(elastic_hsdp, folder, size, args=args)
    shrunk: list[dict[int, int]] = []

    async def scenario() -> None:
        try:
            await world.start()
            await world.until(lambda: world.dead == {lost}, "the loss", world.run_s)
            await world.shrink()
            shrunk.append({rank: report.step for rank, report in world.committed.items()})
            assert world.left == dict.fromkeys(leaving, 0)
            await world.grow()
            await world.until(lambda: len(world.done) == size, "the end", world.run_s)
        finally:
            await world.stop()

    asyncio.run(scenario())
    staying = set(range(size)) - {lost} - leaving
    (committed,) = shrunk
    # A rank parked before the update, with all sums, can still finish the step without the others.
    finished = moment == "after backward" and committed == dict.fromkeys(staying, 7)
    assert finished or committed == dict.fromkeys(staying, 6)
    assert world.incarnations == {rank: int(rank not in staying) for rank in range(size)}
    used = Counter(
        line for rank in range(size) for line in (folder / f"used-{rank}").read_text().splitlines()
    )
    whole = Counter(f"{step} {part}" for step in range(STEPS) for part in range(size))
    not_recorded = Counter(f"5 {part}" for part in {lost, *leaving} if finished)
    assert used == whole - not_recorded
    ended = ends(world)
    calm = ends(run(tmp_path / "calm", elastic_hsdp, size=size, steps=STEPS, mesh=mesh))
    for column in zip(*mesh, strict=True):
        for name, tensor in calm[column[0]].items():
            for rank in column:
                assert torch.equal(ended[column[0]][name], ended[rank][name])
            # The same batches summed in another order: equal up to rounding.
            assert torch.allclose(tensor, ended[column[0]][name], rtol=1e-3, atol=1e-5), name
