"""Two models with an optimizer each, as in a GAN: a fault can strike between their updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import WIDTH, batch, digest, inject_fault, seed

STEPS = 6


def gan(args: dict[str, Any]) -> None:
    """The critic learns first, then the generator, within one step."""
    seed(1234)
    job = taskd.init()
    nets = [nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, 1))]
    generator, critic = (DDP(net) for net in nets)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    job.protect(model=[generator, critic], optimizer=optimizers)
    for step in job.steps(STEPS):
        with step:
            data, _ = batch(args["rank"], step)
            optimizers[1].zero_grad()
            fake = generator(torch.rand(data.shape))
            torch.autograd.backward((critic(fake.detach()) - critic(data)).mean())
            optimizers[1].step()
            inject_fault(args, step, "between the updates")
            optimizers[0].zero_grad()
            torch.autograd.backward(-critic(fake).mean())
            optimizers[0].step()
            inject_fault(args, step, "after the updates")
    end = [digest(net, optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


@pytest.mark.parametrize("where", ["between the updates", "after the updates"])
def test_kill_between_two_updates_loses_no_step(tmp_path: Path, where: str) -> None:
    plain = ends(run(tmp_path / "plain", gan))
    killed = run(tmp_path / "killed", gan, kills=[(1, 0, 2, where), (3, 0, 4, where)])
    assert killed.incarnations[1] == killed.incarnations[3] == 1
    for before, after in zip(plain, ends(killed), strict=True):
        for one, other in zip(before, after, strict=True):
            assert same(one, other)


class Count:
    """Grows between steps, on each rank by another number."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def counting(args: dict[str, Any]) -> None:
    seed(1234)
    job = taskd.init()
    nets = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    models, count = [DDP(net) for net in nets], Count()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    job.protect(model=models, optimizer=optimizers, count=count)
    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                data, _ = batch(args["rank"], step)
                for model, optimizer in zip(models, optimizers, strict=True):
                    optimizer.zero_grad()
                    torch.autograd.backward(model(data).mean())
                    optimizer.step()
                    inject_fault(args, step, "between the updates")
        count.value += args["rank"] + 1
    torch.save({"count": torch.tensor(count.value)}, f"{args['folder']}/end-{args['rank']}.pt")


def test_survivor_keeps_what_it_did_between_steps(tmp_path: Path) -> None:
    """It goes back to its copy of the step, which was made before that."""
    killed = run(tmp_path / "killed", counting, kills=[(1, 0, 2, "between the updates")])
    assert killed.incarnations[1] == 1
    counts = [int(end["count"]) for end in ends(killed)]
    assert counts == [STEPS * (rank + 1) for rank in range(len(counts))]
