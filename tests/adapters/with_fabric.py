"""A training loop with Lightning Fabric: protects what `fabric.setup` returns."""

import os

import torch
from lightning.fabric import Fabric

import taskd.torch as taskd
from tests.adapters.ending import die, show

job = taskd.init()
torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
job.protect(model=model._forward_module, optimizer=optimizer.optimizer)

for step in job.steps(30):
    with step:
        fabric.backward(model(torch.randn(8, 16) + job.rank).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    die(job.rank, step)
show(net)
