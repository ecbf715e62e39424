"""Scripts whose ranks do not hold the same: objects, experts, stages, slices, gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.replicas.comparison import Comparison
from tests.integration.torch.scripts import CLASSES, WIDTH, digest, inject_fault, seed


class Draws:
    """A generator of this rank, and how far its data has been read: what a loader has."""

    def __init__(self, number: int) -> None:
        self.generator = torch.Generator().manual_seed(number)
        self.position = 0

    def batch(self) -> torch.Tensor:
        self.position += 1
        return torch.rand(8, WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.position = state["position"]


class Losses:
    """Equal in the beginning, different after the first step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


class Bad:
    """A counter that is the same on all ranks for a long time."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def finish(args: dict[str, Any], end: dict[str, Any]) -> None:
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


class Count:
    """Changed between steps: equal on all ranks, or not."""

    def __init__(self, by: int) -> None:
        self.by, self.total = by, 0

    def add(self) -> None:
        self.total = 3 * self.total % 1_000_003 + self.by

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def changed_between_steps(args: dict[str, Any]) -> None:
    """DDP or FSDP2; counters, early stopping and the learning rate change after the step."""
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model: Any = fully_shard(net) if args["sharded"] else DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    shared, own = Count(1), Count(job.rank)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    job.protect(model=model, optimizer=optimizer, shared=shared, own=own, schedule=schedule)
    totals = []
    for step in job.steps(args["steps"]):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                inject_fault(args, step, "in forward")
                batch = torch.full((8, WIDTH), 1.0 + shared.total % 7 + own.total % 5)
                model(batch).square().mean().backward()
                inject_fault(args, step, "after backward")
                optimizer.step()
                inject_fault(args, step, "after the update")
        inject_fault(args, step, "updated")
        shared.add()
        inject_fault(args, step, "between steps")
        own.add()
        schedule.step()
        inject_fault(args, step, "before the next step")
        totals = [shared.total, own.total, schedule.get_last_lr()[0]]
    weights = [getattr(one, "to_local", one.detach)() for one in net.parameters()]
    finish(args, {"totals": totals, "weights": [one.detach().clone() for one in weights]})


def sharded_objects(args: dict[str, Any]) -> None:
    """FSDP2, with a loader of each rank."""
    seed(1234)
    job = taskd.init()
    net: Any = nn.Linear(WIDTH, CLASSES)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    data = Draws(job.rank)
    job.protect(model=net, optimizer=optimizer, data=data)
    for step in job.steps(args["steps"]):
        with step:
            inject_fault(args, step, "in forward")
            torch.autograd.backward(net(data.batch()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    weights = [one.to_local().detach().clone() for one in net.parameters()]
    finish(args, {"weights": weights, "data": data.state_dict()})


def own_objects(args: dict[str, Any]) -> None:
    """DDP, with a loader of each rank, read inside or outside of the step, and its losses."""
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data, losses = Draws(job.rank), Losses()
    job.protect(model=model, optimizer=optimizer, data=data, losses=losses)
    for step in job.steps(args["steps"]):
        inject_fault(args, step, "between steps")
        with step:
            inject_fault(args, step, "in forward")
            loss = model(data.batch()).square().mean()
            if not args.get("late"):
                losses.seen.append(float(loss.detach()))
            torch.autograd.backward(loss)
            inject_fault(args, step, "after backward")
            optimizer.step()
            if args.get("late"):
                losses.seen.append(float(loss.detach()))
            inject_fault(args, step, "after the update")
            optimizer.zero_grad()
    finish(args, {**digest(net, optimizer), "data": data.state_dict(), "losses": losses.seen})


def drifting(args: dict[str, Any]) -> None:
    """Replicas that become different in a step in which the ranks do not compare everything."""
    seed(1234)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES))
    net.register_buffer("queue", torch.zeros(4))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    bad = Bad() if args["drift"] == "part" else None
    own = Draws(job.rank) if args["has_own"] else None
    job.protect(model=model, optimizer=optimizer, bad=bad, own=own)
    for step in job.steps(args["steps"]):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                is_drifting = int(step) >= 5 and job.rank == args["drifter"]
                inject_fault(args, step, "in forward")
                if is_drifting and args["drift"] == "buffers":
                    net.queue.add_(1)  # type: ignore[operator]
                torch.autograd.backward(model(torch.rand(8, WIDTH)).square().mean())
                inject_fault(args, step, "after backward")
                optimizer.step()
                if is_drifting and args["drift"] == "weights":
                    with torch.no_grad():
                        net[0].weight.add_(0.01)  # type: ignore[operator]
                if is_drifting and bad is not None:
                    bad.count += 1
                inject_fault(args, step, "after the update")
    finish(args, digest(net, optimizer))


def momentum_encoder(args: dict[str, Any]) -> None:
    """The forward pass itself moves weights that no optimizer has."""
    seed(1234)
    job = taskd.init()
    net, teacher = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
    model = DDP(net)
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job.protect(model=[model, teacher], optimizer=optimizer)
    for step in job.steps(args["steps"]):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                for slow, fast in zip(teacher.parameters(), net.parameters(), strict=True):
                    slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
                batch = torch.rand(8, WIDTH) + job.rank
                inject_fault(args, step, "in forward")
                torch.autograd.backward((model(batch) - teacher(batch)).square().mean())
                inject_fault(args, step, "after backward")
                optimizer.step()
                inject_fault(args, step, "after the update")
    finish(args, {**digest(net, optimizer), "teacher": teacher.state_dict()})


def read_before_the_step(args: dict[str, Any]) -> None:
    """A protected loader that the code before the attempts reads."""
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Draws(job.rank)
    job.protect(model=model, optimizer=optimizer, data=data)
    for step in job.steps(args["steps"]):
        batch = data.batch()
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                torch.autograd.backward(model(batch).square().mean())
                optimizer.step()
        inject_fault(args, step, "between steps")
    finish(args, {**digest(net, optimizer), "data": data.state_dict()})


def experts(args: dict[str, Any]) -> None:
    """Each rank has an expert of its own; tokens travel by all_to_all, the router is common."""
    seed(1)
    job = taskd.init()
    router = nn.Linear(WIDTH, WIDTH)
    if not args.get("alike"):
        seed(100 + job.rank)
    expert = nn.Linear(WIDTH, WIDTH)
    net = nn.ModuleDict({"router": router, "expert": expert})
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    job.protect(model=net, optimizer=optimizer)
    optimizer.register_step_post_hook(lambda *_: inject_fault(args, job.step, "updated"))
    for step in job.steps(args["steps"]):
        with step:
            optimizer.zero_grad()
            inject_fault(args, step, "in forward")
            batch = torch.rand(8, WIDTH) + job.rank
            routed = router(batch)
            there = torch.empty_like(routed)
            dist.all_to_all_single(there, routed.detach())
            back = torch.empty_like(there)
            out = expert(there)
            dist.all_to_all_single(back, out.detach())
            torch.autograd.backward(out.square().mean() + (routed * back).mean())
            inject_fault(args, step, "after backward")
            for parameter in router.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            inject_fault(args, step, "after the update")
    finish(args, digest(net, optimizer))


def accumulated(args: dict[str, Any]) -> None:
    """An update in every fourth step only; the gradients of the others stay on their rank."""
    compare = Comparison.compare

    def compare_or_die(self: Comparison, step: int, has_left_gradients: bool) -> bool | None:
        inject_fault(args, step, "before the comparison")
        return compare(self, step, has_left_gradients)

    Comparison.compare = compare_or_die  # type: ignore[method-assign]
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"]):
        with step:
            batch = torch.rand(8, WIDTH) * (1 + job.rank)
            inject_fault(args, step, "in forward")
            if int(step) % 4 < 3:
                with model.no_sync():
                    torch.autograd.backward(model(batch).square().mean())
                inject_fault(args, step, "after backward")
            else:
                torch.autograd.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    finish(args, digest(net, optimizer))


def compressed(args: dict[str, Any]) -> None:
    """PowerSGD: each rank adds what it has left out of the last gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, WIDTH)
    model = DDP(net)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    assert state.iter == 0, "protection has not used the hook"
    for step in job.steps(args["steps"]):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                data = torch.rand(8, WIDTH) * (1 + job.rank)
                inject_fault(args, step, "in forward")
                torch.autograd.backward((model(data) - data).square().mean())
                inject_fault(args, step, "after backward")
                optimizer.step()
    finish(args, digest(net, optimizer))


def buffers(args: dict[str, Any]) -> None:
    """BatchNorm statistics that DDP does not exchange."""
    seed(1234)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, CLASSES))
    model = DDP(net, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(args["steps"]):
        with step:
            optimizer.zero_grad()
            inject_fault(args, step, "in forward")
            torch.autograd.backward(model(torch.rand(8, WIDTH) + job.rank).square().mean())
            inject_fault(args, step, "after backward")
            optimizer.step()
    finish(args, digest(net, optimizer))


def pipeline(args: dict[str, Any]) -> None:
    """Two stages of a pipeline, each with a replica under DDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    seed(1)
    job = taskd.init()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    at, copy = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    net = DDP(layers[at], process_group=mesh.get_group("dp")) if args.get("ddp") else layers[at]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stage = PipelineStage(net, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[args["schedule"]]
    schedule = kind(stage, 4, loss_fn=nn.functional.mse_loss)
    job.protect(model=net, optimizer=optimizer)
    optimizer.register_step_post_hook(lambda *_: inject_fault(args, job.step, "updated"))
    for step in job.steps(args["steps"]):
        with step:
            optimizer.zero_grad()
            draws = torch.Generator().manual_seed(10 * int(step) + copy)
            batch, target = torch.rand(2, 8, WIDTH, generator=draws).unbind()
            inject_fault(args, step, "in forward")
            if at == 0:
                schedule.step(batch)
            else:
                schedule.step(target=target)
            inject_fault(args, step, "after backward")
            optimizer.step()
            inject_fault(args, step, "after the update")
    finish(args, digest(layers[at], optimizer))


def unreduced(args: dict[str, Any]) -> None:
    """FSDP2 that leaves gradients of whole parameters to the next step."""
    from torch.distributed.fsdp import fully_shard

    from taskd.errors import SettingsError

    job = taskd.init()
    net: Any = nn.Linear(WIDTH, CLASSES)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    job.protect(model=net, optimizer=optimizer)
    refused = ""
    try:
        for step in job.steps(2):
            with step:
                net.set_requires_gradient_sync(int(step) == 1)
                torch.autograd.backward(net(torch.rand(2, WIDTH)).sum())
                if int(step) == 1:
                    optimizer.step()
    except SettingsError as error:
        refused = str(error)
    finish(args, {"refused": refused})
