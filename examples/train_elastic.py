"""A training script that continues with fewer ranks, and still uses every sample exactly once.

A step's batch has one part for each rank that the job was started with. `step.parts` yields those
of this rank: its own and, while other ranks are missing, its share of theirs.

The model counts the samples itself: each sample adds its weight to one cell of a ledger, which is a
parameter, so gradients, updates and repairs treat it like every other weight.

taskd run --nproc-per-node 4 --strategies elastic-training examples/train_elastic.py
"""

import sys
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import taskd.torch as taskd

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
PACE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0


class Net(torch.nn.Module):
    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)
        )
        self.ledger = torch.nn.Parameter(torch.zeros(STEPS, world_size))

    def forward(self, batch: torch.Tensor, step: int, part: int) -> torch.Tensor:
        return (self.layers(batch) - batch).square().mean() - self.ledger[step, part]


job = taskd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = Net(job.world_size)
model = DistributedDataParallel(net) if job.world_size > 1 else net
optimizer = torch.optim.SGD(
    [
        {"params": net.layers.parameters(), "lr": 0.05, "momentum": 0.9},
        {"params": [net.ledger], "lr": 1.0},
    ]
)
job.protect(model=model, optimizer=optimizer, elastic="accumulate")

sizes = set()
for step in job.steps(STEPS):
    for attempt in step:
        with attempt:
            optimizer.zero_grad()
            for part in step.parts(model):
                data = torch.randn(
                    32, 64, generator=torch.Generator().manual_seed(1000 * step + part)
                )
                loss = model(data, int(step), part)
                (loss * step.share).backward()
                threading.Event().wait(PACE_S)
            optimizer.step()
    sizes.add(len(job.members))

if job.rank == 0:
    once = torch.allclose(net.ledger, torch.full_like(net.ledger, 1 / job.world_size))
    print(f"{STEPS} steps with {' and '.join(map(str, sorted(sizes)))} ranks")
    print(f"each of {net.ledger.numel()} samples used once: {'yes' if once else 'NO'}")
