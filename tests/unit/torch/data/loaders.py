"""Loaders as people write them, for the tests of `Job.batches`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

SAMPLES, BATCH = 22, 4


class Augmented(Dataset[torch.Tensor]):
    """Draws from every kind of generator."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.rng = np.random.default_rng(7)
        self.transforms = [random.Random(3), torch.Generator().manual_seed(4)]
        self.epoch = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        own, generator = self.transforms
        assert isinstance(own, random.Random)
        assert isinstance(generator, torch.Generator)
        drawn = [random.random(), own.random(), np.random.rand(), self.rng.random()]
        drawn += [torch.rand(()).item(), torch.rand((), generator=generator).item(), self.epoch]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class EpochAware(Augmented):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Lazy(Sampler[int]):
    """Draws while it is iterated, and counts its epochs itself."""

    def __init__(self) -> None:
        self.rng = random.Random(5)
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(SAMPLES):
            yield (self.rng.randrange(SAMPLES) + random.randrange(SAMPLES) + self.epochs) % SAMPLES
        self.epochs += 1

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[torch.Tensor]):
    """Uneven parts for two workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        size = SAMPLES if worker is None else 7 + 10 * worker.id
        for index in range(size):
            drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
            yield torch.tensor([index, *drawn], dtype=torch.float64)


class Batches:
    """An iterable of batches without workers, loader or length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(5):
            yield torch.rand(3)


def noisy_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) * torch.rand(())


def seed_numpy(worker: int) -> None:
    np.random.seed(torch.initial_seed() % 2**32)


def _shuffled(**how: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), BATCH, shuffle=True, **how)


KEPT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffled": _shuffled,
    "shuffled, own generator": lambda: _shuffled(generator=torch.Generator().manual_seed(9)),
    "drop_last": lambda: _shuffled(drop_last=True, collate_fn=noisy_collate),
    "workers": lambda: _shuffled(num_workers=2, worker_init_fn=seed_numpy),
    "kept workers": lambda: _shuffled(**KEPT),
    "epoch aware, kept workers": lambda: DataLoader(EpochAware(), BATCH, **KEPT),
    "single samples": lambda: DataLoader(Augmented(), batch_size=None, shuffle=True),
    "distributed": lambda: DataLoader(
        Augmented(), BATCH, sampler=DistributedSampler(Augmented(), 3, 1, seed=1)
    ),
    "batch sampler": lambda: DataLoader(
        Augmented(),
        batch_sampler=BatchSampler(
            RandomSampler(range(SAMPLES), replacement=True, num_samples=50), BATCH, False
        ),
    ),
    "weighted": lambda: DataLoader(
        Augmented(), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, 30)
    ),
    "lazy sampler": lambda: DataLoader(Augmented(), BATCH, sampler=Lazy()),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream, workers": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "stream, kept workers": lambda: DataLoader(Stream(), BATCH, **KEPT),
    "iterable": Batches,
    "list": lambda: [torch.full((2,), float(number)) for number in range(6)],
}
