"""Datasets as the worker processes of a loader see them: each batch has its own random numbers.

They are sent to workers, so everything in here can be pickled. Attributes are those of the dataset
inside, because a `worker_init_fn` may read and change them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from taskd.torch.data import generators
from taskd.torch.data.generators import Generator, Seeds


@dataclass(frozen=True, slots=True)
class BatchIndex:
    """What a loader's sampler gives to a worker: the indices of a batch, and which batch it is."""

    indices: Any
    epoch: int
    number: int


class _Wrapped:
    """Has the attributes of the dataset inside, and some of its own."""

    _inner: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_own_") or name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_own_") or name == "_inner":
            object.__setattr__(self, name, value)
        else:
            setattr(self._inner, name, value)


class SeededDataset(_Wrapped, Dataset[Any]):
    """A map-style dataset. Its keys are `BatchIndex`."""

    def __init__(self, inner: Any, seeds: Seeds) -> None:
        self._inner, self._own_seeds = inner, seeds
        self._own_epoch = -1
        self._own_generators: dict[str, Generator] = {}

    def __getitems__(self, key: BatchIndex) -> Any:
        self._begin(key)
        fetch = getattr(self._inner, "__getitems__", None)
        return fetch(key.indices) if fetch else [self._inner[index] for index in key.indices]

    def __getitem__(self, key: BatchIndex) -> Any:
        self._begin(key)
        return self._inner[key.indices]

    def __len__(self) -> int:
        return len(self._inner)

    def _begin(self, key: BatchIndex) -> None:
        if key.epoch != self._own_epoch:
            self._own_epoch = key.epoch
            set_epoch(self._inner, key.epoch)
            self._own_generators = generators.find(self._inner)
        seeds = self._own_seeds.of("batch", key.epoch, key.number)
        generators.seed_process(seeds)
        generators.reseed(self._own_generators, seeds)


class SeededStream(_Wrapped, IterableDataset[Any]):
    """An iterable dataset. A worker that is kept for the next epoch counts the epochs itself."""

    def __init__(self, inner: Any, seeds: Seeds, batch_size: int | None) -> None:
        self._inner, self._own_seeds, self._own_batch_size = inner, seeds, batch_size or 1
        self._own_epoch = 0

    def begin_at(self, epoch: int) -> None:
        """The next iteration is this epoch."""
        self._own_epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._own_epoch = self._own_epoch, self._own_epoch + 1
        set_epoch(self._inner, epoch)
        worker = get_worker_info()
        seeds = self._own_seeds.of("stream", epoch, worker.id if worker else 0)
        generators.seed_process(seeds)
        generators.reseed(generators.find(self._inner), seeds)
        return self._seeded(iter(self._inner), seeds)

    def _seeded(self, items: Iterator[Any], seeds: Seeds) -> Iterator[Any]:
        count = 0
        while True:
            if count % self._own_batch_size == 0:
                generators.seed_process(seeds.of("batch", count // self._own_batch_size))
            try:
                item = next(items)
            except StopIteration:
                return
            count += 1
            yield item


def set_epoch(owner: Any, epoch: int) -> None:
    """Tell a dataset or sampler its epoch, if it wants to know."""
    if has_shared_epoch(owner) and get_worker_info() is not None:
        return
    if callable(method := getattr(owner, "set_epoch", None)):
        method(epoch)


def has_shared_epoch(owner: Any) -> bool:
    """Whether all workers see one epoch: a single number in shared memory, as Hugging Face's
    streams have it.

    Then only the process that starts them sets it: two workers at once would both add to it.
    """
    return any(
        isinstance(value, torch.Tensor) and value.dim() == 0 and bool(value.is_shared())  # type: ignore[no-untyped-call]
        for value in getattr(owner, "__dict__", {}).values()
    )
