"""Tensor parallelism inside FSDP2: a mesh of two by two ranks.

taskd run --nproc-per-node 4 examples/gallery/tp_fsdp2.py
"""

import torch
from shared import pace, show
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import taskd.torch as taskd  # +

STEPS = 40

torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
net = nn.Sequential()
for _ in range(2):
    block = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    parallelize_module(block, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
    net.append(block)
fully_shard(net, mesh=mesh["data"])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
job.protect(model=net, optimizer=optimizer)  # +

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            # The ranks of one tensor-parallel group share their batch.
            drawn = torch.Generator().manual_seed(100 * step + mesh["data"].get_local_rank())
            batch = torch.randn(16, 32, generator=drawn)
            loss = (net(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

show(job, net)
