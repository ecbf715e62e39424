"""`Job.batches`: the data is the same whether or not ranks were lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import taskd.torch as taskd
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import digest, inject_fault, seed
from tests.unit.torch.data.loaders import EpochAware, Stream

EPOCHS, SIZE = 3, 2


class Uneven(Stream):
    """Another number of batches for each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        for number, sample in enumerate(super().__iter__()):
            if number < 12 + 6 * self.rank:
                yield torch.cat([sample, torch.rand(4, dtype=torch.float64) + self.rank])


def train(args: dict[str, Any]) -> None:
    rank = args["rank"]
    seed(1234 + rank)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    model = DDP(net.double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    epochs = []
    for step, batch in job.batches(DataLoader(Uneven(rank), 3), epochs=EPOCHS):
        inject_fault(args, step, "before the step")
        with step:
            optimizer.zero_grad()
            batch.mul_(0.5)  # a batch that is changed in place is the same in a replay
            inject_fault(args, step, "in forward")
            output = model(batch)
            torch.autograd.backward((output - batch).square().mean())
            inject_fault(args, step, "after backward")
            optimizer.step()
        if job.step > step and step.ends_epoch:
            for _ in DataLoader(EpochAware(), 2, shuffle=True):  # an evaluation
                torch.rand(3)
            epochs.append((step.epoch, int(step)))
    end = {**digest(net, optimizer), "epochs": epochs[-1:], "steps": job.step}
    torch.save(end, Path(args["folder"]) / f"end-{rank}.pt")


def test_uneven_streams_end_together_and_go_on_at_their_own_positions(tmp_path: Path) -> None:
    plain = ends(run(tmp_path / "plain", train, size=SIZE))
    steps = plain[0]["steps"]
    assert steps == EPOCHS * 4
    assert plain[0]["epochs"] == [(EPOCHS - 1, steps - 1)]
    kills = [(1, 0, 2, "in forward"), (0, 0, 5, "before the step"), (1, 1, 9, "after backward")]
    world = run(tmp_path / "killed", train, size=SIZE, kills=kills)
    assert [world.incarnations[rank] for rank in range(SIZE)] == [1, 2]
    for before, after in zip(plain, ends(world), strict=True):
        assert same(before, after)
