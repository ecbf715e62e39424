"""Training scripts for the tests, with faults that strike at a chosen moment."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.groups import sockets
from taskd.torch.state.sharded import local

WIDTH, CLASSES, BATCH = 32, 8, 16


def happens(told: dict[str, Any], kind: str, *here: int | str) -> bool:
    """Whether the test wants this fault in this rank, life and place: once, and it is noted."""
    place = (told["rank"], told["life"], *here)
    if place not in told.get(kind, ()):
        return False
    told[kind] = [other for other in told[kind] if other != place]
    with (Path(told["folder"]) / "faults").open("a") as file:
        file.write(f"{json.dumps([kind, *place])}\n")
    return True


def strike(told: dict[str, Any], step: int, moment: str) -> None:
    """Die here, or lose the links to the peers, if the test wants it. Each fault strikes once."""
    if happens(told, "kills", int(step), moment):
        os.kill(os.getpid(), signal.SIGKILL)
    if happens(told, "cuts", int(step), moment):
        for one in sockets.scan():
            if not one.listening and one.peer_port not in told["ports"]:
                sockets.cut(one)


def corrupt(told: dict[str, Any], step: int, moment: str, tensors: Iterable[torch.Tensor]) -> None:
    """Flip one bit in the last of these tensors, if the test wants it. Each flip strikes once."""
    if happens(told, "flips", int(step), moment):
        *_, last = tensors
        local(last).view(-1).view(torch.int32)[1] ^= 1 << 12


def declare(told: dict[str, Any], step: int) -> None:
    """Say that this rank's state is wrong, once, if the test wants it."""
    if happens(told, "declares", int(step)):
        raise taskd.Corrupt("the memory controller says so")


class Hiccup(Exception):
    """What a script may list in `retry_on`."""


class SmallHiccup(Hiccup): ...


def stumble(told: dict[str, Any], step: int, moment: str) -> None:
    """Raise an exception of the script's own here, once, if the test wants it."""
    if happens(told, "raises", int(step), moment):
        raise SmallHiccup(f"in step {int(step)}")


def witness(told: dict[str, Any], job: taskd.Job, incident: int, step: int) -> None:
    """Write down where the job stood when a step began, and where it stands after it."""
    with (Path(told["folder"]) / f"commits-{told['rank']}").open("a") as file:
        file.write(f"{told['life']} {incident} {int(step)} {job._incident} {job.step}\n")


class Tally:
    """The steps that have gone into the state, in their order. It travels with the state."""

    def __init__(self) -> None:
        self.done: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"done": list(self.done)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.done = list(state["done"])


def batch(rank: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step * 1000 + rank * 10 + part)
    return (
        torch.randn(BATCH, WIDTH, generator=random),
        torch.randint(CLASSES, (BATCH,), generator=random),
    )


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def noise() -> float:
    """What a script draws from Python and NumPy goes into its weights."""
    return random.random() * 0.1 + float(np.random.rand()) * 0.1


def generators() -> dict[str, Any]:
    """Where the random numbers of torch, Python and NumPy stand."""
    numpy = np.random.get_state(legacy=False)["state"]
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [numpy["key"].tolist(), numpy["pos"]],
    }


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict()["state"],
        "random": generators(),
    }


def ddp(told: dict[str, Any]) -> None:
    """DDP with dropout over gloo."""
    seed(1234 + told["rank"])
    job = taskd.init(told.get("backend"))
    net = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, CLASSES)
    )
    model = DDP(net, bucket_cap_mb=0.01)  # many buckets, so that their layout matters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tally = Tally()
    job.protect(model=model, optimizer=optimizer, tally=tally, **told.get("protect", {}))
    optimizer.register_step_pre_hook(lambda *_: strike(told, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(lambda *_: strike(told, job.step, "after the optimizer"))
    log = Path(told["folder"]) / f"log-{told['rank']}"
    strike(told, 1, "joining")
    for step in job.steps(told["steps"]):
        incident = job._incident
        strike(told, step, "between steps")
        corrupt(told, step, "a weight", net.parameters())
        corrupt(told, step, "momentum", (one["exp_avg"] for one in optimizer.state.values()))
        with step:
            tally.done.append(int(step))
            optimizer.zero_grad()
            data, target = batch(told["rank"], step)
            strike(told, step, "in forward")
            declare(told, step)
            output = model(data + noise())
            stumble(told, step, "in forward")
            output.register_hook(lambda g, s=step: strike(told, s, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, target))
            strike(told, step, "after backward")
            stumble(told, step, "after backward")
            optimizer.step()
            corrupt(told, step, "a weight, updated", net.parameters())
        witness(told, job, incident, step)
        if job.step > step:
            with log.open("a") as file:
                file.write(f"{job.step}\n")
    end = {**digest(net, optimizer), "done": tally.done}
    torch.save(end, Path(told["folder"]) / f"end-{told['rank']}.pt")


def setup(told: dict[str, Any]) -> None:
    """What scripts agree on before they train: a seed, a flag, a plan, a place to write to."""
    job = taskd.init()
    seed = torch.tensor([random.SystemRandom().randrange(1 << 40) if job.rank == 0 else 0])
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed) + job.rank)
    found = torch.tensor([1.0 if job.rank == 3 else 0.0])
    dist.all_reduce(found)
    plan = [{"width": 48, "seed": int(seed)} if job.rank == 0 else None]
    dist.broadcast_object_list(plan, src=0)
    names: list[Any] = [None] * job.world_size
    dist.all_gather_object(names, f"rank {job.rank}")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = torch.tensor([float(job.rank)])
    dist.all_reduce(mine, group=pairs[job.rank // 2])
    dist.barrier()
    agreed = {"seed": int(seed), "found": float(found), "plan": plan, "names": names}
    agreed["pair"] = float(mine)
    assert plan[0] is not None
    net = nn.Sequential(nn.Linear(WIDTH, plan[0]["width"]), nn.Linear(plan[0]["width"], CLASSES))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    drawn = torch.zeros(())
    for step in job.steps(told["steps"]):
        with step:
            optimizer.zero_grad()
            drawn = torch.rand(BATCH, WIDTH)
            strike(told, step, "in forward")
            torch.autograd.backward(model(drawn).square().mean())
            optimizer.step()
    end = {**digest(net, optimizer), "agreed": agreed, "drawn": drawn}
    torch.save(end, Path(told["folder"]) / f"end-{told['rank']}.pt")


def closure(told: dict[str, Any]) -> None:
    """All of the step happens inside the optimizer, as under some frameworks."""
    seed(1234)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = told["optimizer"](model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(told["steps"]):

        def whole(step: taskd.Step = step) -> torch.Tensor:
            optimizer.zero_grad()
            data, target = batch(told["rank"], step)
            output = model(data)
            output.register_hook(lambda g: strike(told, step, "in backward"))
            loss = nn.functional.cross_entropy(output, target)
            torch.autograd.backward(loss)
            strike(told, step, "after backward")
            return loss

        with step:
            optimizer.step(whole)
    torch.save(digest(net, optimizer), Path(told["folder"]) / f"end-{told['rank']}.pt")


class Position:
    """Where a data loader would be: changed by reading, restored with the rest."""

    def __init__(self) -> None:
        self.at = 0

    def next(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.at += 1
        return batch(rank, self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def everything(told: dict[str, Any]) -> None:
    """BatchNorm, dropout, accumulation, autocast, grad scaler, scheduler, and a data position."""
    seed(99 + told["rank"])
    job = taskd.init()
    net = nn.Sequential(
        nn.Linear(WIDTH, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, CLASSES),
    )
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=told["steps"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    data = Position()
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data)
    optimizer.register_step_pre_hook(lambda *_: strike(told, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(lambda *_: strike(told, job.step, "after the optimizer"))
    for step in job.steps(told["steps"]):
        strike(told, step, "between steps")
        with step:
            for part in range(3):
                inputs, target = data.next(told["rank"])
                inputs = inputs + noise()
                synced = contextlib.nullcontext() if part == 2 else model.no_sync()
                with synced, torch.autocast("cpu", dtype=torch.bfloat16):
                    strike(told, step, "in forward")
                    output = model(inputs)
                    loss = nn.functional.cross_entropy(output.float(), target) / 3
                if part == 2:
                    output.register_hook(lambda g, s=step: strike(told, s, "in backward"))
                with contextlib.nullcontext() if part == 2 else model.no_sync():
                    torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            strike(told, step, "after backward")
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
    end = digest(net, optimizer)
    end["small"] = [
        scheduler.last_epoch,
        scaler.get_scale(),
        data.at,
        optimizer.param_groups[0]["lr"],
    ]
    torch.save(end, Path(told["folder"]) / f"end-{told['rank']}.pt")


def hsdp(told: dict[str, Any]) -> None:
    """FSDP2 on a mesh of two replicas of two shards each."""
    _fully_sharded(told, (2, 2), ("replicate", "shard"))


def fsdp(told: dict[str, Any]) -> None:
    """FSDP2 over all ranks: no shard exists twice."""
    _fully_sharded(told, (4,), ("shard",))


def _fully_sharded(told: dict[str, Any], shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seed(7)
    job = taskd.init()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    net = nn.Sequential(
        nn.Linear(WIDTH, 64),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)),
        nn.Linear(64, CLASSES),
    )
    fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    tally = Tally()
    job.protect(model=net, optimizer=optimizer, tally=tally, **told.get("protect", {}))
    optimizer.register_step_pre_hook(lambda *_: strike(told, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(lambda *_: strike(told, job.step, "after the optimizer"))
    for step in job.steps(told["steps"]):
        incident = job._incident
        strike(told, step, "between steps")
        corrupt(told, step, "a weight", net.parameters())
        with step:
            tally.done.append(int(step))
            optimizer.zero_grad()
            data, target = batch(told["rank"], step)
            strike(told, step, "in forward")
            declare(told, step)
            output = net(data + noise())
            stumble(told, step, "in forward")
            output.register_hook(lambda g, s=step: strike(told, s, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, target))
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            strike(told, step, "after backward")
            stumble(told, step, "after backward")
            optimizer.step()
        witness(told, job, incident, step)
    end = {
        "model": {name: local(value).clone() for name, value in net.state_dict().items()},
        "optimizer": [
            {name: local(value).clone() for name, value in optimizer.state[p].items()}
            for p in net.parameters()
        ],
        "random": generators(),
        "done": tally.done,
    }
    torch.save(end, Path(told["folder"]) / f"end-{told['rank']}.pt")


def elastic(told: dict[str, Any]) -> None:
    """DDP that shares out the parts of missing ranks; records which samples it used."""
    torch.manual_seed(5)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    log = Path(told["folder"]) / f"used-{told['rank']}"
    for step in job.steps(told["steps"]):
        used = []
        with step:
            optimizer.zero_grad()
            for part in step.parts(model):
                data, target = batch(part, step)
                strike(told, step, "in forward")
                loss = nn.functional.cross_entropy(model(data), target) * step.share
                torch.autograd.backward(loss)
                used.append(part)
            optimizer.step()
        if job.step > step:
            with log.open("a") as file:
                file.writelines(f"{int(step)} {part}\n" for part in used)
        threading.Event().wait(told.get("pace_s", 0.0))
    torch.save(digest(net, optimizer), Path(told["folder"]) / f"end-{told['rank']}.pt")
