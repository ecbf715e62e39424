"""Pipeline parallelism with torch.distributed.pipelining: each rank holds its own stage.

taskd run --nproc-per-node 2 examples/gallery/pipeline.py
"""

import torch
from shared import pace, show
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import taskd.torch as taskd  # +

STEPS, MICRO_BATCHES, BATCH, WIDTH = 40, 4, 16, 32

torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(job.rank)  # every stage has its own weights
stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
runs = PipelineStage(stage, job.rank, job.world_size, torch.device("cpu"))
schedule = Schedule1F1B(runs, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
job.protect(model=stage, optimizer=optimizer)  # +

first, last = job.rank == 0, job.rank == job.world_size - 1
for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(int(step))
            batch = torch.randn(BATCH, WIDTH, generator=drawn)
            optimizer.zero_grad()
            losses: list[torch.Tensor] = []
            schedule.step(
                *([batch] if first else []),
                **({"target": batch.roll(1, -1), "losses": losses} if last else {}),
            )
            optimizer.step()
    if step % 10 == 0 and last:
        print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)

show(job, stage)
