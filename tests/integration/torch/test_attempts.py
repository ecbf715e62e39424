"""`for attempt in step`: the code after the attempts runs once per committed step."""

from __future__ import annotations

import logging
from collections import Counter
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
from tests.integration.torch.scripts import CLASSES, WIDTH, batch, digest, inject_fault, seed

STEPS = 8
KILLS = [(1, 0, 2, "in forward"), (0, 0, 4, "after backward"), (3, 0, 5, "after the update")]


def attempts(args: dict[str, Any]) -> None:
    """Draws random numbers in the step, and writes down each committed step and its loss."""
    seed(1234)
    copy_schedule.SHORT_S = args.get("short_s", copy_schedule.SHORT_S)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.Dropout(0.3), nn.Linear(32, CLASSES))
    model: nn.Module = net
    if args.get("sharded"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    else:
        model = DDP(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer, **args.get("protect", {}))

    def train(step: taskd.Step) -> torch.Tensor:
        optimizer.zero_grad()
        data, target = batch(args["rank"], step)
        inject_fault(args, step, "in forward")
        loss = nn.functional.cross_entropy(model(data), target)
        torch.autograd.backward(loss)
        inject_fault(args, step, "after backward")
        optimizer.step()
        inject_fault(args, step, "after the update")
        return loss.detach()

    log: list[tuple[int, float]] = []
    for step in job.steps(STEPS):
        inject_fault(args, step, "before the step")
        if args["form"] == "function":
            loss = step.run(train, step)
        else:
            for attempt in step:
                with attempt:
                    loss = train(step)
        inject_fault(args, step, "after the step")
        log.append((int(step), float(loss)))
    end = {
        "model": {name: local(value).clone() for name, value in net.state_dict().items()},
        "optimizer": [
            {name: local(value).clone() for name, value in optimizer.state[p].items()}
            for p in net.parameters()
        ],
        "log": log,
    }
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def check(plain: list[Any], disturbed: list[Any]) -> None:
    for rank, (before, after) in enumerate(zip(plain, disturbed, strict=True)):
        assert same(before["model"], after["model"]), f"rank {rank}"
        assert same(before["optimizer"], after["optimizer"]), f"rank {rank}"
        numbers = [number for number, _ in after["log"]]
        assert numbers == list(range(STEPS))[-len(numbers) :], f"rank {rank}"
        known = dict(before["log"])
        assert all(loss == known[number] or loss != loss for number, loss in after["log"])


@pytest.mark.parametrize("form", ["attempts", "function"])
def test_code_after_a_step_runs_once(tmp_path: Path, form: str) -> None:
    plain = ends(run(tmp_path / "plain", attempts, form=form))
    world = run(tmp_path / "killed", attempts, form=form, kills=KILLS)
    assert [world.incarnations[rank] for rank in range(4)] == [1, 1, 0, 1]
    check(plain, ends(world))
    assert [number for number, _ in ends(world)[2]["log"]] == list(range(STEPS))


def test_sharded_job_does_not_go_back(tmp_path: Path) -> None:
    """Every step is copied before it is committed, so no survivor has to be replaced."""
    plain = ends(run(tmp_path / "plain", attempts, form="attempts", sharded=True))
    kills = [*KILLS, (2, 0, 6, "before the step"), (0, 1, 6, "after the step")]
    args: dict[str, Any] = {"form": "attempts", "sharded": True, "short_s": 60.0}
    world = run(tmp_path / "killed", attempts, kills=kills, **args)
    check(plain, ends(world))
    assert [world.incarnations[rank] for rank in range(4)] == [2, 1, 1, 1]


def test_ranks_that_cannot_go_back_are_replaced_in_the_same_incident(tmp_path: Path) -> None:
    args: dict[str, Any] = {"form": "attempts", "sharded": True, "protect": {"snapshot_every": 3}}
    plain = ends(run(tmp_path / "plain", attempts, **args))
    world = run(tmp_path / "killed", attempts, kills=[(1, 0, 5, "in forward")], **args)
    check(plain, ends(world))
    assert world.plans[0].resume == 3
    assert Counter(world.incarnations.values()) == {1: 4}, "each rank was beyond step 3"
    assert world.incident == 1
    assert ends(world)[0]["log"][0][0] == 3, "the code after steps 3 and 4 ran again"


def old_form(args: dict[str, Any]) -> None:
    logging.basicConfig(filename=Path(args["folder"]) / f"log-{args['rank']}", force=True)
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            torch.autograd.backward(model(torch.rand(4, WIDTH)).sum())
            inject_fault(args, step, "after backward")
            dist.barrier()
            optimizer.step()
    torch.save(digest(net, optimizer), Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_old_form_warns_that_code_after_it_may_run_twice(tmp_path: Path) -> None:
    ends(run(tmp_path / "run", old_form, kills=[(1, 0, 3, "after backward")]))
    logs = [(tmp_path / "run" / f"log-{rank}").read_text() for rank in range(4)]
    warnings = [log.count("code after `with step:` also runs") for log in logs]
    assert warnings == [1, 0, 1, 1], "once per rank that was in the step"
