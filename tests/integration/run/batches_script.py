"""A training script with a loader of another kind for each run, which kills its own ranks.

Arguments: the name of the loader. KILLS: `rank.incarnation.step.moment`, with commas between.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import taskd.torch as taskd
from tests.unit.torch.data.loaders import KEPT, LOADERS, EpochAware, Stream

EPOCHS, SAMPLES = 3, 64


def die(step: int, moment: str) -> None:
    here = f"{os.environ['RANK']}.{os.environ['TASKD_INCARNATION']}.{int(step)}.{moment}"
    if here in os.environ.get("KILLS", "").split(","):
        os.kill(os.getpid(), signal.SIGKILL)


def main(name: str) -> None:
    job = taskd.init()
    if name == "distributed":
        data = EpochAware(SAMPLES)
        sampler: DistributedSampler[int] = DistributedSampler(data, job.world_size, job.rank)
        loader: Any = DataLoader(data, 5, sampler=sampler, **KEPT)
    elif name == "stateful stream":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Stream(), 4, num_workers=2, persistent_workers=True)
    else:
        loader = LOADERS[name]()
    torch.manual_seed(5)
    width = 4 if "stream" in name else 8
    net = nn.Sequential(nn.Linear(width, 16), nn.LayerNorm(16), nn.Linear(16, width)).double()
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    torch.manual_seed(job.rank)
    for step, batch in job.batches(loader, epochs=EPOCHS):
        for attempt in step:
            die(step, "before")
            with attempt:
                optimizer.zero_grad()
                batch += torch.rand(batch.shape)  # changed in place, and restored for a replay
                die(step, "forward")
                torch.autograd.backward(model(batch).square().mean())
                die(step, "backward")
                optimizer.step()
        if step.ends_epoch:
            for _ in DataLoader(EpochAware(), 2, shuffle=True, num_workers=1):  # an evaluation
                torch.rand(3)
    whole = torch.cat([value.flatten().double() for value in net.state_dict().values()])
    sys.stdout.write(
        f"end {job.rank} {job.step} {hashlib.sha256(whole.numpy().tobytes()).hexdigest()}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
