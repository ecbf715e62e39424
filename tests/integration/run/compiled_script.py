"""A training script with torch.compile, which kills its own ranks.

KILLS: `rank.incarnation.step`, with commas between. Each rank writes how long its first step took.
"""

import hashlib
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd


def main() -> None:
    job = taskd.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    model = DDP(torch.compile(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    incarnation = os.environ["TASKD_INCARNATION"]
    reported = 0
    for step in job.steps(14):
        began = time.monotonic()
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                loss = model(torch.randn(16, 64) + job.rank).square().mean()
                here = f"{job.rank}.{incarnation}.{int(step)}"
                if here in os.environ.get("KILLS", "").split(","):
                    os.kill(os.getpid(), signal.SIGKILL)
                torch.autograd.backward(loss)
                optimizer.step()
        if reported != os.getpid():  # a replacement has the variables of its predecessor
            from torch._dynamo.utils import counters

            found = counters["inductor"]
            took = time.monotonic() - began
            hits, misses = found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]
            text = f"first {job.rank} {incarnation} hits {hits} misses {misses} took {took:.3f}\n"
            sys.stdout.write(text)
            reported = os.getpid()
    whole = torch.cat([value.flatten() for value in net.state_dict().values()])
    sys.stdout.write(f"end {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}\n")


if __name__ == "__main__":
    main()
