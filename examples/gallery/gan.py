"""A GAN: two models, two optimizers, two updates in one step.

taskd run --nproc-per-node 2 examples/gallery/gan.py
"""

import torch
import torch.nn.functional as F
from shared import pace, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd  # +

STEPS, BATCH, NOISE, WIDTH = 40, 16, 8, 16

torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
makes = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, WIDTH))
judges = nn.Sequential(nn.Linear(WIDTH, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator, critic = DDP(makes), DDP(judges)
makes_step = torch.optim.Adam(makes.parameters(), lr=2e-3, betas=(0.5, 0.999))
judges_step = torch.optim.Adam(judges.parameters(), lr=2e-3, betas=(0.5, 0.999))
job.protect(model=[generator, critic], optimizer=[makes_step, judges_step])  # +
yes, no = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

for step in job.steps(STEPS):  # +
    for attempt in step:  # +
        with attempt:  # +
            pace()
            drawn = torch.Generator().manual_seed(100 * step + job.rank)
            real = torch.randn(BATCH, WIDTH, generator=drawn) * 0.5 + 1
            fake = generator(torch.randn(BATCH, NOISE, generator=drawn))

            judges_step.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            wrong = F.binary_cross_entropy_with_logits(scores, torch.cat([yes, no]))
            wrong.backward()
            judges_step.step()

            makes_step.zero_grad()
            caught = F.binary_cross_entropy_with_logits(judges(fake), yes)
            caught.backward()
            makes_step.step()
    if step % 10 == 0 and job.rank == 0:
        print(f"step {step}: {wrong.item():.4f} {caught.item():.4f}", flush=True)

show(job, makes, judges)
