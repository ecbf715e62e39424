"""A training script without taskd, with its own checkpoint. Arguments: STEPS KILL_AT."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

steps, kill_at = int(sys.argv[1]), int(sys.argv[2])
folder = Path(os.environ["BENCH_DIR"])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
checkpoint = folder / f"checkpoint.{rank}"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
held = torch.tensor(step)
dist.all_reduce(held, dist.ReduceOp.MIN)
step = int(held)
while step < steps:
    model(torch.randn(32, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    with (folder / f"steps.{rank}").open("a") as file:
        file.write(f"{time.monotonic()}\n")
    fresh = folder / f"new.{rank}"
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, fresh
    )
    fresh.rename(checkpoint)
    if step == kill_at and rank == 1 and not (folder / "killed").exists():
        (folder / "killed").write_text(f"{time.monotonic()}")
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
