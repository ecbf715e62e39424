"""In-process recovery for PyTorch: lose a rank, lose no step.

    import taskd.torch as taskd

    job = taskd.init()
    model = DDP(build_model())
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)

    for step in job.steps(10_000):
        for attempt in step:
            with attempt:
                loss_fn(model(batch(step))).backward()
                optimizer.step()

Importing this module also puts a hook behind all optimizers of torch, which records steps when
profiling is switched on.
"""

from taskd.errors import UnknownTorch
from taskd.torch.init import init
from taskd.torch.job import Job
from taskd.torch.loop.section import Section
from taskd.torch.profiling import optimizer_hook as optimizer_hook
from taskd.torch.recovery import NotRepaired
from taskd.torch.replicas.guard import Corrupt
from taskd.torch.step import Attempt, Step

__all__ = ["Attempt", "Corrupt", "Job", "NotRepaired", "Section", "Step", "UnknownTorch", "init"]
