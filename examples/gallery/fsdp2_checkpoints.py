"""FSDP2 with asynchronous checkpoints by torch.distributed.checkpoint, and a resume from them.

taskd run --nproc-per-node 2 examples/gallery/fsdp2_checkpoints.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shared import pace, show
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import taskd.torch as taskd  # +

STEPS, EVERY = 40, 10
FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())


def newest() -> int:
    """The step of the newest complete checkpoint; 0: there is none."""
    return max((int(path.parent.name) for path in FOLDER.glob("*/.metadata")), default=0)


torch.set_num_threads(1)
job = taskd.init()  # +
side_group = dist.new_group(backend="gloo")
torch.manual_seed(0)
net = nn.Sequential(
    nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 8)
)
fully_shard(net[1])
fully_shard(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
start = newest()
if start:
    weights, state = get_state_dict(net, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=FOLDER / str(start))
    set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=state)
job.protect(model=net, optimizer=optimizer)  # +

saving = None
for step in job.steps(STEPS, start):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(100 * step + job.rank)
            batch = torch.randn(16, 32, generator=drawn)
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if job.step % EVERY == 0:
        for attempt in job.section("checkpoint"):  # +
            with attempt:  # +
                if saving is not None:
                    saving.result()
                weights, state = get_state_dict(net, optimizer)
                saving = dcp.async_save(
                    {"model": weights, "optimizer": state},
                    checkpoint_id=FOLDER / str(job.step),
                    process_group=side_group,
                )
        if job.rank == 0:
            print(f"step {job.step}: loss {loss.item():.4f}, checkpoint begun", flush=True)

if saving is not None:
    saving.result()
show(job, net)
