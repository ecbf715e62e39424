"""Training scripts for the tests, with faults that are injected at a chosen moment."""

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


def is_due(args: dict[str, Any], kind: str, *here: int | str) -> bool:
    """Whether the test wants this fault in this rank, incarnation and place. True only once."""
    place = (args["rank"], args["incarnation"], *here)
    if place not in args.get(kind, ()):
        return False
    line = f"{json.dumps([kind, *place])}\n"
    with (Path(args["folder"]) / "faults").open("a+") as file:  # no step is undone in a file
        file.seek(0)
        is_new = line not in file.readlines()
        if is_new:
            file.write(line)
    return is_new


def inject_fault(args: dict[str, Any], step: int, moment: str) -> None:
    """Die here, or lose the connections to the peers, if the test wants it. Each fault once."""
    if is_due(args, "kills", int(step), moment):
        os.kill(os.getpid(), signal.SIGKILL)
    if is_due(args, "cuts", int(step), moment):
        for one in sockets.scan():
            if not one.listening and one.peer_port not in args["ports"]:
                sockets.shut_down(one)


def flip_bit(args: dict[str, Any], step: int, moment: str, tensors: Iterable[torch.Tensor]) -> None:
    """Flip one bit in the last of these tensors, if the test wants it. Once."""
    if is_due(args, "flips", int(step), moment):
        *_, last = tensors
        local(last).view(-1).view(torch.int32)[1] ^= 1 << 12


def raise_corrupt(args: dict[str, Any], step: int) -> None:
    """Report that this rank's state is wrong, once, if the test wants it."""
    if is_due(args, "declares", int(step)):
        raise taskd.Corrupt("the memory controller says so")


class Hiccup(Exception):
    """What a script may list in `retry_on`."""


class SmallHiccup(Hiccup): ...


def raise_hiccup(args: dict[str, Any], step: int, moment: str) -> None:
    """Raise an exception of the script's own here, once, if the test wants it."""
    if is_due(args, "raises", int(step), moment):
        raise SmallHiccup(f"in step {int(step)}")


def record_commit(args: dict[str, Any], job: taskd.Job, incident: int, step: int) -> None:
    """Write the incident and step at which a step began, and those after it."""
    with (Path(args["folder"]) / f"commits-{args['rank']}").open("a") as file:
        file.write(f"{args['incarnation']} {incident} {int(step)} {job.incident} {job.step}\n")


class StepLog:
    """The steps that are part of the state, in order. It is transferred with the state."""

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
    """Random numbers of Python and NumPy that influence the weights."""
    return random.random() * 0.1 + float(np.random.rand()) * 0.1


def generators() -> dict[str, Any]:
    """The state of the generators of torch, Python and NumPy."""
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


def ddp(args: dict[str, Any]) -> None:
    """DDP with dropout over gloo."""
    seed(1234 + args["rank"])
    job = taskd.init(args.get("backend"))
    net = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.Linear(64, CLASSES)
    )
    model = DDP(net, bucket_cap_mb=0.01)  # many buckets, so that their layout matters
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step_log = StepLog()
    job.protect(model=model, optimizer=optimizer, step_log=step_log, **args.get("protect", {}))
    optimizer.register_step_pre_hook(lambda *_: inject_fault(args, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(
        lambda *_: inject_fault(args, job.step, "after the optimizer")
    )
    log = Path(args["folder"]) / f"log-{args['rank']}"
    inject_fault(args, 1, "joining")
    for step in job.steps(args["steps"]):
        incident = job.incident
        inject_fault(args, step, "between steps")
        flip_bit(args, step, "a weight", net.parameters())
        flip_bit(args, step, "momentum", (one["exp_avg"] for one in optimizer.state.values()))
        with step:
            step_log.done.append(int(step))
            optimizer.zero_grad()
            data, target = batch(args["rank"], step)
            inject_fault(args, step, "in forward")
            raise_corrupt(args, step)
            output = model(data + noise())
            raise_hiccup(args, step, "in forward")
            output.register_hook(lambda g, s=step: inject_fault(args, s, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, target))
            inject_fault(args, step, "after backward")
            raise_hiccup(args, step, "after backward")
            optimizer.step()
            flip_bit(args, step, "a weight, updated", net.parameters())
        record_commit(args, job, incident, step)
        if job.step > step:
            with log.open("a") as file:
                file.write(f"{job.step}\n")
    end = {**digest(net, optimizer), "done": step_log.done}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def setup(args: dict[str, Any]) -> None:
    """A set-up with collectives: ranks agree on a seed, a flag, a plan and a folder."""
    job = taskd.init()
    seed = torch.tensor([random.SystemRandom().randrange(1 << 40) if job.rank == 0 else 0])
    dist.broadcast(seed, src=0)
    torch.manual_seed(int(seed) + job.rank)
    found = torch.tensor([1.0 if job.rank == 3 else 0.0])
    dist.all_reduce(found)
    plan = [{"width": 48, "seed": int(seed)} if job.rank == 0 else None]
    dist.broadcast_object_list(plan, src=0)
    stamp = ["x" * random.SystemRandom().randrange(1, 1000)]
    dist.broadcast_object_list(stamp, src=0)
    names: list[Any] = [None] * job.world_size
    dist.all_gather_object(names, f"rank {job.rank}")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = torch.tensor([float(job.rank)])
    dist.all_reduce(mine, group=pairs[job.rank // 2])
    dist.barrier()
    agreed = {"seed": int(seed), "found": float(found), "plan": plan, "names": names}
    agreed["pair"], agreed["stamp"] = float(mine), stamp
    assert plan[0] is not None
    net = nn.Sequential(nn.Linear(WIDTH, plan[0]["width"]), nn.Linear(plan[0]["width"], CLASSES))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    job.protect(model=model, optimizer=optimizer)
    drawn = torch.zeros(())
    for step in job.steps(args["steps"]):
        with step:
            optimizer.zero_grad()
            drawn = torch.rand(BATCH, WIDTH)
            inject_fault(args, step, "in forward")
            torch.autograd.backward(model(drawn).square().mean())
            optimizer.step()
    end = {**digest(net, optimizer), "agreed": agreed, "drawn": drawn}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def closure(args: dict[str, Any]) -> None:
    """The whole step happens in the closure of the optimizer, as under some frameworks."""
    seed(1234)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = args["optimizer"](model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"]):

        def whole(step: taskd.Step = step) -> torch.Tensor:
            optimizer.zero_grad()
            data, target = batch(args["rank"], step)
            output = model(data)
            output.register_hook(lambda g: inject_fault(args, step, "in backward"))
            loss = nn.functional.cross_entropy(output, target)
            torch.autograd.backward(loss)
            inject_fault(args, step, "after backward")
            return loss

        with step:
            optimizer.step(whole)
    torch.save(digest(net, optimizer), Path(args["folder"]) / f"end-{args['rank']}.pt")


class Position:
    """The position of a data loader: reading changes it, and it is restored with the rest."""

    def __init__(self) -> None:
        self.at = 0

    def next(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.at += 1
        return batch(rank, self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def everything(args: dict[str, Any]) -> None:
    """BatchNorm, dropout, accumulation, autocast, grad scaler, scheduler, and a data position."""
    seed(99 + args["rank"])
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
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args["steps"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    data = Position()
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, data=data)
    optimizer.register_step_pre_hook(lambda *_: inject_fault(args, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(
        lambda *_: inject_fault(args, job.step, "after the optimizer")
    )
    for step in job.steps(args["steps"]):
        inject_fault(args, step, "between steps")
        with step:
            for part in range(3):
                inputs, target = data.next(args["rank"])
                inputs = inputs + noise()
                synced = contextlib.nullcontext() if part == 2 else model.no_sync()
                with synced, torch.autocast("cpu", dtype=torch.bfloat16):
                    inject_fault(args, step, "in forward")
                    output = model(inputs)
                    loss = nn.functional.cross_entropy(output.float(), target) / 3
                if part == 2:
                    output.register_hook(lambda g, s=step: inject_fault(args, s, "in backward"))
                with contextlib.nullcontext() if part == 2 else model.no_sync():
                    torch.autograd.backward(scaler.scale(loss))
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inject_fault(args, step, "after backward")
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
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def hsdp(args: dict[str, Any]) -> None:
    """FSDP2 on a mesh of two replicas of two shards each."""
    _fully_sharded(args, (2, 2), ("replicate", "shard"))


def fsdp(args: dict[str, Any]) -> None:
    """FSDP2 over all ranks: every shard exists once."""
    _fully_sharded(args, (4,), ("shard",))


def _fully_sharded(args: dict[str, Any], shape: tuple[int, ...], names: tuple[str, ...]) -> None:
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
    step_log = StepLog()
    job.protect(model=net, optimizer=optimizer, step_log=step_log, **args.get("protect", {}))
    optimizer.register_step_pre_hook(lambda *_: inject_fault(args, job.step, "in the optimizer"))
    optimizer.register_step_post_hook(
        lambda *_: inject_fault(args, job.step, "after the optimizer")
    )
    for step in job.steps(args["steps"]):
        incident = job.incident
        inject_fault(args, step, "between steps")
        flip_bit(args, step, "a weight", net.parameters())
        for attempt in step if args.get("by_attempts") else (step,):
            with attempt:
                step_log.done.append(int(step))
                optimizer.zero_grad()
                data, target = batch(args["rank"], step)
                inject_fault(args, step, "in forward")
                raise_corrupt(args, step)
                output = net(data + noise())
                raise_hiccup(args, step, "in forward")
                output.register_hook(lambda g, s=step: inject_fault(args, s, "in backward"))
                torch.autograd.backward(nn.functional.cross_entropy(output, target))
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                inject_fault(args, step, "after backward")
                raise_hiccup(args, step, "after backward")
                optimizer.step()
        record_commit(args, job, incident, step)
    end = {
        "model": {name: local(value).clone() for name, value in net.state_dict().items()},
        "optimizer": [
            {name: local(value).clone() for name, value in optimizer.state[p].items()}
            for p in net.parameters()
        ],
        "random": generators(),
        "done": step_log.done,
    }
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


def elastic(args: dict[str, Any]) -> None:
    """DDP that divides the parts of missing ranks; records which samples it used."""
    torch.manual_seed(5)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    model = DDP(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    job.protect(model=model, optimizer=optimizer)
    log = Path(args["folder"]) / f"used-{args['rank']}"
    for step in job.steps(args["steps"]):
        used = []
        with step:
            optimizer.zero_grad()
            for part in step.parts(model):
                data, target = batch(part, step)
                inject_fault(args, step, "in forward")
                loss = nn.functional.cross_entropy(model(data), target) * step.share
                torch.autograd.backward(loss)
                used.append(part)
            optimizer.step()
        if job.step > step:
            with log.open("a") as file:
                file.writelines(f"{int(step)} {part}\n" for part in used)
        threading.Event().wait(args.get("pace_s", 0.0))
    torch.save(digest(net, optimizer), Path(args["folder"]) / f"end-{args['rank']}.pt")
