"""One small script per parallelism: what the ranks hold, and how they exchange it, differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from taskd.torch.state.sharded import local
from tests.integration.torch.scripts import WIDTH, inject_fault, seed

Pass = Callable[[torch.Tensor], Any]


def train(
    args: dict[str, Any], job: taskd.Job, nets: list[nn.Module], run: Pass, batch_of: int
) -> None:
    """`run` computes the gradients of a batch. Ranks with the same `batch_of` share a batch."""
    optimizer = torch.optim.AdamW([p for net in nets for p in net.parameters()], lr=0.01)
    job.protect(model=nets, optimizer=optimizer)
    for step in job.steps(args["steps"]):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                draws = torch.Generator().manual_seed(100 * int(step) + batch_of)
                inject_fault(args, step, "in forward")
                run(torch.rand(8, WIDTH, generator=draws))
                inject_fault(args, step, "after backward")
                optimizer.step()
                inject_fault(args, step, "after the update")
    states = [one for net in nets for one in net.state_dict().values()]
    moments = [one for state in optimizer.state.values() for one in state.values()]
    end = {"weights": [local(one).clone() for one in (*states, *moments)]}
    torch.save(end, Path(args["folder"]) / f"end-{args['rank']}.pt")


class Rotated(torch.autograd.Function):
    """Gives a tensor to the next rank of the ring, and its gradient back to the previous one."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return _rotate(tensor, 1)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _rotate(gradients[0], -1)


def _rotate(tensor: torch.Tensor, by: int) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(tensor)
    sent = tensor.contiguous()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, (rank + by) % size),
            dist.P2POp(dist.irecv, received, (rank - by) % size),
        ]
    ):
        work.wait()
    return received


class RingAttention(nn.Module):
    """Each rank has a slice of the sequence; keys and values go round."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, slice_: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(slice_).chunk(3, dim=-1)
        scores, values = [], []
        for _ in range(dist.get_world_size()):
            scores.append(query @ key.T / WIDTH**0.5)
            values.append(value)
            both = Rotated.apply(torch.cat([key, value]))  # type: ignore[no-untyped-call]
            key, value = both.chunk(2)
        attention = torch.cat(scores, dim=-1).softmax(-1)
        return self.out(attention @ torch.cat(values))  # type: ignore[no-any-return]


def context_parallel(args: dict[str, Any]) -> None:
    """A ring: all ranks have the same weights, and each a part of every sequence."""
    seed(7)
    job = taskd.init()
    model = DDP(RingAttention())

    def run(sequence: torch.Tensor) -> None:
        mine = sequence.chunk(job.world_size)[job.rank]
        torch.autograd.backward((model(mine) - mine.roll(1, -1)).square().mean())

    train(args, job, [model], run, batch_of=0)


def interleaved(args: dict[str, Any]) -> None:
    """A pipeline of four stages on two ranks, two on each."""
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules

    seed(7)
    job = taskd.init()
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    numbers = [job.rank, job.rank + 2]
    if args["schedule"] == "ScheduleZBVZeroBubble":
        numbers = [job.rank, 3 - job.rank]
    mine: list[nn.Module] = [layers[number] for number in numbers]
    stages = [
        pipelining.PipelineStage(layers[number], number, 4, torch.device("cpu"))
        for number in numbers
    ]
    schedule = getattr(schedules, args["schedule"])(stages, 4, loss_fn=nn.functional.mse_loss)

    def run(batch: torch.Tensor) -> None:
        target = {"target": batch.roll(1, -1)} if 3 in numbers else {}
        schedule.step(*([batch] if 0 in numbers else []), **target)

    train(args, job, mine, run, batch_of=0)


class Summed(torch.autograd.Function):
    """The sum over all ranks, whose gradient is that of each part."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def slices(args: dict[str, Any]) -> None:
    """Tensor parallelism by hand: plain modules, each rank with its own columns and rows."""
    seed(7)
    job = taskd.init()
    whole = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
    each = 2 * WIDTH // job.world_size
    columns, rows = nn.Linear(WIDTH, each), nn.Linear(each, WIDTH, bias=False)
    here = slice(job.rank * each, (job.rank + 1) * each)
    with torch.no_grad():
        columns.weight.copy_(whole[0].weight[here])
        columns.bias.copy_(whole[0].bias[here])
        rows.weight.copy_(whole[1].weight[:, here])

    def run(batch: torch.Tensor) -> None:
        output = Summed.apply(rows(columns(batch).relu()))  # type: ignore[no-untyped-call]
        torch.autograd.backward((output - batch).square().mean())

    train(args, job, [columns, rows], run, batch_of=0)


def tensor_parallel(args: dict[str, Any]) -> None:
    """Distributed tensors without FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh

    seed(7)
    job = taskd.init()
    net = _split_over(init_device_mesh("cpu", (job.world_size,)))
    train(args, job, [net], lambda batch: _descend(net, batch), batch_of=0)


def three_dimensions(args: dict[str, Any]) -> None:
    """Replicas of shards of slices: HSDP with tensor parallelism inside, two by two by two."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    seed(7)
    job = taskd.init()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "slice"))
    net = _split_over(mesh["slice"])
    fully_shard(net, mesh=mesh["replicate", "shard"])
    train(args, job, [net], lambda batch: _descend(net, batch), batch_of=job.rank // 2)


def _split_over(mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
    return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _descend(net: nn.Module, batch: torch.Tensor) -> None:
    torch.autograd.backward((net(batch) - batch.roll(1, -1)).square().mean())
