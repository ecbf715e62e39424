"""A training loop with Accelerate over a loader that it has prepared."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import taskd.torch as taskd
from tests.adapters.ending import die, show

job = taskd.init()
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.randn(150, 16)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
job.protect(model=model, optimizer=optimizer.optimizer)

for step, (inputs,) in job.batches(loader, epochs=3):
    for attempt in step:
        with attempt:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    die(job.rank, step)
show(net)
