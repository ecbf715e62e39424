"""A training loop with Accelerate: protects what `accelerator.prepare` returns."""

import torch
from accelerate import Accelerator

import taskd.torch as taskd
from tests.adapters.ending import die, show

job = taskd.init()
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=30)
model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
job.protect(model=model, optimizer=optimizer.optimizer, scheduler=scheduler)

for step in job.steps(30):
    with step:
        inputs = torch.randn(8, 16) + job.rank
        accelerator.backward(model(inputs).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    die(job.rank, step)
show(net)
