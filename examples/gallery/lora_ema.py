"""Fine-tuning of low-rank adapters on a frozen model, with a moving average of the weights.

taskd run --nproc-per-node 2 examples/gallery/lora_ema.py
"""

import torch
from shared import pace, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import taskd.torch as taskd  # +

STEPS, WIDTH, LOW_RANK = 40, 32, 4


class Adapted(nn.Module):
    """A frozen linear layer with a trainable correction of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, LOW_RANK, bias=False)
        self.up = nn.Linear(LOW_RANK, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
net = nn.Sequential(Adapted(nn.Linear(WIDTH, 64)), nn.Tanh(), Adapted(nn.Linear(64, WIDTH)))
model = DDP(net)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
job.protect(model=model, optimizer=optimizer, average=average)  # +

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(100 * step + job.rank)
            batch = torch.randn(16, WIDTH, generator=drawn)
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            average.update_parameters(net)
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

show(job, net, average)
