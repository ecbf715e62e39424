"""Ranks are lost in steps, in the code after them and in sections, at random moments."""

from __future__ import annotations

import json
import random
from collections import Counter
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.copies import copy_schedule
from taskd.torch.state.sharded import local
from tests.integration.torch.runs import ends, run, same
from tests.integration.torch.scripts import CLASSES, WIDTH, batch, inject_fault, seed

STEPS = 6
IN_TURN = [
    "before the step",
    "in forward",
    "after backward",
    "after the update",
    "after the step",
    "in validation",
    "at the end of validation",
    "after validation",
    "at the end of the turn",
]


def script(args: dict[str, Any]) -> None:
    """Evaluates every second step, before the first one and after the last one."""
    seed(77 + args["rank"])
    copy_schedule.SHORT_S = 60.0
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.Linear(32, CLASSES))
    model: nn.Module = net
    if args["sharded"]:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    else:
        model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)

    def train(step: taskd.Step) -> float:
        optimizer.zero_grad()
        data, target = batch(args["rank"], step)
        inject_fault(args, step, "in forward")
        loss = nn.functional.cross_entropy(model(data), target)
        torch.autograd.backward(loss)
        inject_fault(args, step, "after backward")
        optimizer.step()
        inject_fault(args, step, "after the update")
        return loss.item()

    @torch.no_grad()
    def evaluate(step: int) -> float:
        net.eval()
        inject_fault(args, step, "in validation")
        total = model(batch(args["rank"], 1000 + step)[0] + torch.rand(())).sum()
        dist.all_reduce(total)
        inject_fault(args, step, "at the end of validation")
        net.train()
        return float(total) + job.rank

    record = (Path(args["folder"]) / f"record-{args['rank']}").open("a", buffering=1)

    def write(*what: Any) -> None:
        record.write(json.dumps([args["incarnation"], *what]) + "\n")

    first = job.section("first").run(evaluate, -2)
    write("first", first)
    for step in job.steps(STEPS):
        inject_fault(args, step, "before the step")
        loss = step.run(train, step)
        inject_fault(args, step, "after the step")
        write("step", int(step), loss, float(torch.rand(())))
        if step % 2:
            write("value", int(step), job.section("validation").run(evaluate, int(step)))
            inject_fault(args, step, "after validation")
        inject_fault(args, step, "at the end of the turn")
    last: list[float] = []
    for attempt in job.section("last"):
        with attempt:
            last = [evaluate(-1)]
    inject_fault(args, STEPS, "behind the loop")
    write("last", job.section("very last").run(evaluate, -3))
    end = {"model": {name: local(value).clone() for name, value in net.state_dict().items()}}
    torch.save({**end, "last": last}, Path(args["folder"]) / f"end-{args['rank']}.pt")


def records(folder: Path, rank: int) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / f"record-{rank}").read_text().splitlines()]


def _is_lost(line: list[Any]) -> bool:
    """The loss of an attempt that died with its process."""
    return any(isinstance(item, float) and isnan(item) for item in line)


def check(plain: Path, killed: Path, kills: list[Any], size: int) -> None:
    for rank in range(size):
        known = {json.dumps(line[1:]) for line in records(plain, rank)}
        lines = records(killed, rank)
        seen = Counter(json.dumps(line[1:]) for line in lines if not _is_lost(line))
        assert set(seen) <= known, f"rank {rank} saw {set(seen) - known}"
        steps = Counter(line[2] for line in lines if line[1] == "step")
        turns = {step for victim, _, step, _ in kills if victim == rank}
        for step in range(STEPS):
            most = 2 if step in turns else 1
            assert 1 <= steps[step] <= most, f"rank {rank} ran the code after {step}: {steps}"


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param) / "plain"
    sharded = request.param == "fsdp"
    return folder, sharded, ends(run(folder, script, size=3, ranks_per_node=3, sharded=sharded))


@pytest.mark.parametrize("number", range(3))
def test_ranks_lost_anywhere_leave_no_trace(calm: Any, number: int, tmp_path: Path) -> None:
    plain, sharded, end = calm
    draw = random.Random(number + 10 * sharded)
    steps = draw.sample(range(1, STEPS), 3)
    kills = [(draw.randrange(3), 0, step, draw.choice(IN_TURN)) for step in steps]
    # A rank is killed once per incarnation.
    kills = [
        (rank, sum(other < step for r, _, other, _ in kills if r == rank), step, moment)
        for rank, _, step, moment in kills
    ]
    world = run(tmp_path / "killed", script, size=3, ranks_per_node=3, sharded=sharded, kills=kills)
    for before, after in zip(end, ends(world), strict=True):
        assert same(before["model"], after["model"]), kills
    check(plain, tmp_path / "killed", kills, 3)
