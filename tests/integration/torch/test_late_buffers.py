"""Buffers that change after the first update of a step, as the BatchNorm of a GAN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import WIDTH, batch, inject_fault, seed

STEPS = 6


def gan(args: dict[str, Any]) -> None:
    """Both models have statistics. The critic sees more data after each update of the step."""
    seed(1234)
    job = taskd.init()
    nets = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)),
        nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)),
    ]
    generator, critic = (DDP(net) for net in nets)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    job.protect(model=[generator, critic], optimizer=optimizers)
    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                inject_fault(args, step - 1, "in the next step")
                data, _ = batch(args["rank"], step)
                optimizers[1].zero_grad()
                fake = generator(torch.rand(data.shape))
                torch.autograd.backward(critic(torch.cat([fake.detach(), data])).mean())
                optimizers[1].step()
                inject_fault(args, step, "between the updates")
                optimizers[0].zero_grad()
                torch.autograd.backward(-critic(fake).mean())
                optimizers[0].step()
                inject_fault(args, step, "after the updates")
                if args["looks_again"]:
                    with torch.no_grad():
                        critic(data)
                inject_fault(args, step, "at the end")
    torch.save([net.state_dict() for net in nets], Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Any]]:
    folder = tmp_path_factory.mktemp("calm")
    return {
        again: ends(run(folder / str(again), gan, size=2, looks_again=again))
        for again in (False, True)
    }


@pytest.mark.parametrize(
    ("rank", "where", "looks_again"),
    [
        (0, "between the updates", False),
        (1, "between the updates", False),
        (0, "after the updates", False),
        (0, "in the next step", False),
        (0, "at the end", True),
        (0, "in the next step", True),
    ],
)
def test_statistics_are_exact_after_a_kill(
    tmp_path: Path, calm: dict[bool, list[Any]], rank: int, where: str, looks_again: bool
) -> None:
    kills = [(rank, 0, 3, where)]
    killed = run(tmp_path / "killed", gan, size=2, looks_again=looks_again, kills=kills)
    assert killed.incarnations[rank] == 1
    for before, after in zip(calm[looks_again], ends(killed), strict=True):
        assert same(before, after)
