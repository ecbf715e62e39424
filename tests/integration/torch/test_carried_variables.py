"""The script's own variables that go from one step to the next, as loops are usually written."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.integration.torch.runs import assert_same, ends, run, same
from tests.integration.torch.scripts import CLASSES, WIDTH, inject_fault, seed

STEPS = 10
KILLS = [
    (1, 0, 2, "in forward"),
    (0, 0, 4, "after the fetch"),
    (1, 1, 5, "before the update"),
    (0, 1, 7, "after the step"),
]


def carry(args: dict[str, Any]) -> None:
    """The next batch is fetched in the step, as in nanoGPT; a hidden state is carried on."""
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, WIDTH)
    head = nn.Linear(WIDTH, CLASSES)
    model = DDP(nn.Sequential(net, head))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    seed(100 + args["rank"])
    data = torch.randn(4, WIDTH)
    hidden = torch.zeros(4, WIDTH)
    average, count, best, log = 1.0, 0, 9.0, list[tuple[int, float, float, int, float]]()
    for step in job.steps(STEPS):
        total = 0.0
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                for _ in range(2):
                    inject_fault(args, step, "in forward")
                    out = model(data + hidden)
                    loss = nn.functional.cross_entropy(out, data[:, :CLASSES].argmax(1)) / average
                    hidden = 0.5 * hidden + data
                    data = torch.randn(4, WIDTH)
                    inject_fault(args, step, "after the fetch")
                    torch.autograd.backward(loss)
                    total += float(loss.detach())
                average = 0.9 * average + 0.1 * float(loss.detach())
                count += 1
                inject_fault(args, step, "before the update")
                optimizer.step()
        inject_fault(args, step, "after the step")
        best = min(best, total)
        log.append((int(step), total, average, count, best))
    end = {"model": net.state_dict(), "log": log, "last": float(loss.detach()), "best": best}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_variables_of_the_loop_are_undone_and_given_to_replacements(tmp_path: Path) -> None:
    plain = ends(run(tmp_path / "plain", carry, size=2))
    world = run(tmp_path / "killed", carry, size=2, kills=KILLS)
    assert [world.incarnations[rank] for rank in range(2)] == [2, 2]
    for before, after in zip(plain, ends(world), strict=True):
        known = {one[0]: one for one in before["log"]}
        assert all(one == known[one[0]] for one in after["log"])
        assert same(before["model"], after["model"])
        assert (before["best"], before["last"]) == (after["best"], after["last"])


SURE_KILLS = [(1, 0, 2, "in forward"), (0, 0, 4, "after the fetch"), (1, 1, 7, "after the step")]
"""At moments at which no other rank can have completed the step without this one."""


class AverageMeter:
    """As in many scripts: it has no state_dict."""

    def __init__(self) -> None:
        self.sum, self.count = torch.zeros(1), 0

    def update(self, value: torch.Tensor, n: int) -> None:
        self.sum += value * n
        self.count += n


best = 9.0


def carry_objects(args: dict[str, Any]) -> None:
    """Steps change objects in place: meters, lists, counters, generators, a global variable."""
    global best
    best = 9.0
    seed(1234)
    job = taskd.init()
    model = DDP(nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    noise, order = torch.Generator().manual_seed(args["rank"]), np.random.default_rng(args["rank"])
    meter, history, stats = AverageMeter(), list[float](), {"right": 0}
    recent = deque[float](maxlen=3)
    matrix = torch.zeros(CLASSES, CLASSES)
    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                data = torch.randn(4, WIDTH, generator=noise) + float(order.normal())
                target = data[:, :CLASSES].argmax(1)
                inject_fault(args, step, "in forward")
                out = model(data)
                loss = nn.functional.cross_entropy(out, target)
                meter.update(loss.detach(), 4)
                stats["right"] += int((out.argmax(1) == target).sum())
                matrix[target, out.argmax(1)] += 1
                recent.append(loss.item())
                inject_fault(args, step, "after the fetch")
                torch.autograd.backward(loss)
                optimizer.step()
        inject_fault(args, step, "after the step")
        history.append(meter.sum.item() / meter.count)
        best = min(best, loss.item())
        if step == 5:  # an epoch ends
            stats = {"right": 0}
    end: dict[str, Any] = {"model": model.state_dict(), "history": history, "stats": stats}
    end |= {
        "matrix": matrix,
        "recent": list(recent),
        "best": best,
        "sum": meter.sum,
        "noise": noise.get_state(),
    }
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_objects_that_steps_change_are_undone_and_given_to_replacements(tmp_path: Path) -> None:
    plain = ends(run(tmp_path / "plain", carry_objects, size=2))
    world = run(tmp_path / "killed", carry_objects, size=2, kills=SURE_KILLS)
    assert [world.incarnations[rank] for rank in range(2)] == [1, 2]
    assert_same(plain, world)


def carry_sharded(args: dict[str, Any]) -> None:
    """A rank is lost after its update, and the others go back to the step that they had done."""
    from torch.distributed.fsdp import fully_shard

    seed(1234)
    job = taskd.init()
    model = nn.Linear(WIDTH, CLASSES)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    average, history = 1.0, list[float]()
    for step in job.steps(STEPS):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                loss = model(torch.randn(4, WIDTH)).square().mean()
                torch.autograd.backward(loss)
                optimizer.step()
                average = 0.9 * average + 0.1 * float(loss.detach())
                history.append(average)
                inject_fault(args, step, "after the update")
    end = {"history": history, "average": average, "last": float(loss.detach())}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_step_that_a_rank_had_done_is_undone_when_the_job_goes_back(tmp_path: Path) -> None:
    plain = ends(run(tmp_path / "plain", carry_sharded, size=2))
    kills = [(1, 0, 4, "after the update"), (0, 0, 7, "after the update")]
    world = run(tmp_path / "killed", carry_sharded, size=2, kills=kills)
    assert_same(plain, world)


class Trainer:
    """Its counter of steps decides when the ranks evaluate together."""

    def __init__(self, args: dict[str, Any], job: taskd.Job) -> None:
        self.args, self.job, self.step = args, job, 0
        self.model = DDP(nn.Linear(WIDTH, CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.noise = torch.Generator().manual_seed(args["rank"])
        self.seen, self.evaluated = list[float](), list[tuple[int, float]]()

    def train(self) -> None:
        self.job.protect(model=self.model, optimizer=self.optimizer)
        for step in self.job.steps(STEPS):
            for attempt in step:
                with attempt:
                    self.train_step()
            if self.step % 3 == 0:
                self.evaluated.append(self.job.section("evaluate").run(self.evaluate))

    def train_step(self) -> None:
        self.optimizer.zero_grad()
        data = torch.randn(4, WIDTH)
        loss = self.model(data).square().mean()
        torch.autograd.backward(loss)
        self.optimizer.step()
        inject_fault(self.args, self.step, "after the update")
        self.seen.append(loss.item())
        self.step += 1

    def evaluate(self) -> tuple[int, float]:
        norm = self.model.module.weight.detach().norm().reshape(1)
        torch.distributed.all_reduce(norm)
        return self.step, norm.item()


def count(args: dict[str, Any]) -> None:
    seed(1234)
    job = taskd.init()
    trainer = Trainer(args, job)
    trainer.train()
    end = {
        "model": trainer.model.module.state_dict(),
        "step": trainer.step,
        "evaluated": trainer.evaluated,
        "seen": len(trainer.seen),
    }
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


LATE_KILLS = [(0, 0, 2, "after the update"), (1, 0, 5, "after the update")]


def test_counter_in_an_object_survives_a_loss_after_the_update(tmp_path: Path) -> None:
    plain = ends(run(tmp_path / "plain", count, size=2))
    world = run(tmp_path / "killed", count, size=2, kills=LATE_KILLS)
    assert [world.incarnations[rank] for rank in range(2)] == [1, 1]
    for before, after in zip(plain, ends(world), strict=True):
        assert same(before["model"], after["model"])
        assert after["step"] == before["step"] == STEPS
        assert after["evaluated"] == before["evaluated"]
