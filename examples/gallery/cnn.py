"""A CNN with DataLoader workers, random augmentation, and a validation after each epoch.

taskd run --nproc-per-node 2 examples/gallery/cnn.py
"""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shared import pace, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import taskd.torch as taskd  # +

EPOCHS, SAMPLES, BATCH = 4, 160, 8


class Augmented(Dataset):
    """Images that a worker flips and shifts at random."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        image = self.images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        shift = int(torch.randint(-2, 3, ()))
        return image.roll(shift, -1), self.labels[index]


def validate(model: nn.Module, loader: DataLoader) -> float:
    """The accuracy over all ranks."""
    model.eval()
    counts = torch.zeros(2)
    with torch.no_grad():
        for images, labels in loader:
            counts += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    model.train()
    if dist.is_initialized():
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


torch.set_num_threads(1)
job = taskd.init()  # +
torch.manual_seed(0)
images, labels = torch.randn(SAMPLES, 3, 16, 16), torch.randint(10, (SAMPLES,))
train_set, test_set = Augmented(images, labels), TensorDataset(images[:32], labels[:32])
size, rank = job.world_size, job.rank
sampler = DistributedSampler(train_set, size, rank, shuffle=True)
loader = DataLoader(train_set, BATCH, sampler=sampler, num_workers=2, persistent_workers=True)
test_loader = DataLoader(test_set, BATCH, sampler=DistributedSampler(test_set, size, rank))

net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(4),
    nn.Flatten(),
    nn.Linear(16 * 16, 10),
)
model = DDP(net) if size > 1 else net
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
job.protect(model=model, optimizer=optimizer, scheduler=scheduler)  # +

for step, (images, labels) in job.batches(loader, epochs=EPOCHS):  # + instead of two loops
    for attempt in step:  # +
        with attempt:  # +
            pace()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            scheduler.step()
    if step.ends_epoch:
        accuracy = job.section("validation").run(validate, net, test_loader)  # + run(…)
        if rank == 0:
            print(f"epoch {step.epoch}: accuracy {accuracy:.3f}", flush=True)

show(job, net)
