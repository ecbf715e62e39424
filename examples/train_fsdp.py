"""A sharded training script that survives faults. No weight exists twice, so copies are kept.

python examples/train_fsdp.py                              # one process, no launcher
taskd run --nproc-per-node 4 examples/train_fsdp.py        # four ranks, a quarter of the state each
"""

import hashlib
import sys
import threading

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import taskd.torch as taskd

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
PACE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
"""The least duration of a step: it gives a person time to kill something."""

job = taskd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 512),
    torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Dropout(0.1)),
    torch.nn.Linear(512, 64),
)
if job.world_size > 1:
    mesh = init_device_mesh("cpu", (job.world_size,))
    fully_shard(net[1], mesh=mesh)
    fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
job.protect(model=net, optimizer=optimizer)  # sees that the state is sharded, and keeps copies

for step in job.steps(STEPS):
    for attempt in step:
        with attempt:
            batch = torch.randn(32, 64) + job.rank
            loss = (net(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(PACE_S)

whole = [value.full_tensor() if job.world_size > 1 else value for value in net.parameters()]
digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in whole)).hexdigest()
if job.rank == 0:
    print(f"{STEPS} steps with {job.world_size} ranks, loss {loss:.6f}, weights {digest[:16]}")
