"""A small transformer under torch.compile, which kills its own rank 1 every so many steps.

Arguments: the folder for the times, the number of steps, and the distance of the kills.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd

WIDTH, LAYERS, PACE_S = 64, 2, 0.25


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, -1)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attended
        down: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return x + down


def main(folder: Path, steps: int, every: int) -> None:
    job = taskd.init()
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(LAYERS)))
    model = DDP(torch.compile(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    times = (folder / f"steps.{job.rank}").open("a", buffering=1)
    due = (int(os.environ["TASKD_INCARNATION"]) + 1) * every
    for step in job.steps(steps):
        times.write(f"begin {int(step)} {time.monotonic()}\n")
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                batch = torch.randn(4, 16, WIDTH) + job.rank
                torch.autograd.backward(model(batch).square().mean())
                if job.rank == 1 and step == due:
                    times.write(f"kill {int(step)} {time.monotonic()}\n")
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.step()
        times.write(f"end {int(step)} {time.monotonic()}\n")
        threading.Event().wait(PACE_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
