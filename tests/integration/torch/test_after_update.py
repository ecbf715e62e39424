"""Scripts that go on after an update within a step: more updates, or an exchange of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.state.sharded import local
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import CLASSES, WIDTH, batch, generators, inject_fault, seed

STEPS, SIZE = 7, 3


class Average:
    """The mean loss of all ranks, step by step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def script(args: dict[str, Any]) -> None:
    """`updates` per step, and the mean of the loss over all ranks after the last one."""
    seed(77)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.Linear(32, CLASSES))
    model: nn.Module = net
    if args["sharded"]:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    else:
        model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    average = Average()
    job.protect(model=model, optimizer=optimizer, average=average)
    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                for update in range(args["updates"]):
                    data, target = batch(args["rank"], 10 * int(step) + update)
                    loss = nn.functional.cross_entropy(model(data), target)
                    optimizer.zero_grad()
                    torch.autograd.backward(loss)
                    inject_fault(args, step, f"before update {update}")
                    optimizer.step()
                    inject_fault(args, step, f"after update {update}")
                if args["exchange"]:
                    total = loss.detach().clone()
                    dist.all_reduce(total)
                    average.losses.append(total.item())
                    inject_fault(args, step, "after the exchange")
    moments = [one for state in optimizer.state.values() for one in state.values()]
    weights = [local(one).clone() for one in (*net.parameters(), *moments)]
    end = {"weights": weights, "random": generators(), "average": average.losses}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


SCRIPTS = {
    "exchange": {"updates": 1, "exchange": True},
    "updates": {"updates": 3, "exchange": False},
}
MOMENTS = {
    "exchange": ["before update 0", "after update 0", "after the exchange"],
    "updates": ["after update 0", "before update 1", "after update 1", "after update 2"],
}


@pytest.fixture(scope="module", params=["exchange", "updates"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def calm(request: pytest.FixtureRequest, kind: str, tmp_path_factory: Any) -> Any:
    args = {**SCRIPTS[kind], "sharded": request.param == "fsdp"}
    folder = tmp_path_factory.mktemp("calm") / "plain"
    return kind, args, ends(run(folder, script, size=SIZE, ranks_per_node=SIZE, **args))


def test_kills_after_an_update_leave_no_trace(calm: Any, tmp_path: Path) -> None:
    kind, args, end = calm
    moments = MOMENTS[kind]
    kills = [(at % SIZE, at // SIZE, 2 + at, moment) for at, moment in enumerate(moments)]
    world = run(tmp_path / "killed", script, size=SIZE, ranks_per_node=SIZE, kills=kills, **args)
    assert sum(world.incarnations.values()) == len(kills), "survivors keep their processes"
    assert_same(end, world)
