"""Expert parallelism: each rank has its own expert, and tokens travel by all-to-all.

taskd run --nproc-per-node 2 examples/gallery/experts.py
"""

import torch
from shared import pace, show
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd  # +

STEPS, TOKENS, WIDTH = 40, 8, 32

torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
shared = nn.Linear(WIDTH, WIDTH)  # the same on all ranks
torch.manual_seed(100 + job.rank)
expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
dense = DDP(shared)
optimizer = torch.optim.AdamW([*shared.parameters(), *expert.parameters()], lr=1e-2)
job.protect(model=[dense, expert], optimizer=optimizer)  # +


def exchange(tokens: torch.Tensor) -> torch.Tensor:
    """Give every rank its share of the tokens of all ranks, and back."""
    return all_to_all_single(torch.empty_like(tokens), tokens)


for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(100 * step + job.rank)
            batch = torch.randn(TOKENS * job.world_size, WIDTH, generator=drawn)
            optimizer.zero_grad()
            output = exchange(expert(exchange(dense(batch))))
            loss = (output - batch).square().mean()
            loss.backward()
            optimizer.step()
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

show(job, shared, expert)
