"""Training that ends by itself when the validation loss no longer falls.

taskd run --nproc-per-node 2 examples/gallery/early_stopping.py
"""

import torch
import torch.distributed as dist
from shared import pace, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd  # +

MOST_STEPS, EVERY, PATIENCE = 400, 5, 3


class Patience:
    """How often in a row the loss has not fallen. It belongs to the state of the training."""

    def __init__(self) -> None:
        self.best, self.worse = float("inf"), 0

    def is_over(self, loss: float) -> bool:
        self.best, self.worse = (loss, 0) if loss < self.best else (self.best, self.worse + 1)
        return self.worse == PATIENCE

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "worse": self.worse}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.best, self.worse = state["best"], int(state["worse"])


torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
target = torch.randn(16, 4)
held_out = torch.randn(64, 16)
net = nn.Linear(16, 4)
model = DDP(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
patience = Patience()
job.protect(model=model, optimizer=optimizer, patience=patience)  # +


def validate() -> float:
    with torch.no_grad():
        loss = (net(held_out) - held_out @ target).square().mean()
    dist.all_reduce(loss)
    return float(loss) / job.world_size


for step in job.steps(MOST_STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(100 * step + job.rank)
            batch = torch.randn(16, 16, generator=drawn)
            noise = 0.3 * torch.randn(16, 4, generator=drawn)
            optimizer.zero_grad()
            (model(batch) - batch @ target - noise).square().mean().backward()
            optimizer.step()
    if step % EVERY == EVERY - 1:
        loss = job.section("validation").run(validate)  # + section
        is_over = patience.is_over(loss)
        if job.rank == 0:
            print(f"step {step}: loss {loss:.4f}, best {patience.best:.4f}", flush=True)
        if is_over:
            break

show(job, net)
