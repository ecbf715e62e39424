"""A training script that survives faults: the six lines marked `# +` are all it needs.

python examples/train_ddp.py                              # one process, no launcher
taskd run --nproc-per-node 4 examples/train_ddp.py        # four ranks, with recovery
"""

import hashlib
import sys
import threading

import torch
from torch.nn.parallel import DistributedDataParallel

import taskd.torch as taskd  # +

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
PACE_S = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
"""The least duration of a step: it gives a person time to kill something."""

job = taskd.init()  # +
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 512),
    torch.nn.BatchNorm1d(512),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(512, 64),
)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
job.protect(model=model, optimizer=optimizer)  # +

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            batch = torch.randn(32, 64) + job.rank
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(PACE_S)

state = torch.cat([tensor.flatten().double() for tensor in net.state_dict().values()])
digest = hashlib.sha256(state.numpy().tobytes()).hexdigest()
if job.rank == 0:
    print(f"{STEPS} steps with {job.world_size} ranks, loss {loss:.6f}, weights {digest[:16]}")
