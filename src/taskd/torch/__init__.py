"""In-process recovery for PyTorch: lose a rank, lose no step.

import taskd.torch as taskd

job = taskd.init()
model = DDP(build_model())
optimizer = torch.optim.AdamW(model.parameters())
job.protect(model=model, optimizer=optimizer)

for step in job.steps(10_000):
    with step:
        loss_fn(model(batch(step))).backward()
        optimizer.step()
"""

from taskd.torch import glance as _glance  # noqa: F401 - puts its hook behind the optimizers
from taskd.torch.guard import Corrupt
from taskd.torch.job import Job
from taskd.torch.joining import init
from taskd.torch.mending import NotRepaired
from taskd.torch.seam import UnknownTorch
from taskd.torch.step import Step

__all__ = ["Corrupt", "Job", "NotRepaired", "Step", "UnknownTorch", "init"]
