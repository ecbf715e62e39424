"""Loaders and datasets of other projects: torchdata and Hugging Face."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from taskd.errors import SettingsError
from taskd.torch.data import sources
from taskd.torch.data.epoch_ends import EpochEnds
from tests.unit.torch.data.loaders import BATCH, KEPT, SAMPLES, Augmented, Stream
from tests.unit.torch.data.test_batch_feed import EPOCHS, all_batches, feed_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def augment(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    drawn = random.random() + np.random.rand() + torch.rand(()).item()
    return {"x": [torch.tensor(value + drawn) for value in rows["x"]]}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"x": list(range(SAMPLES))})


def stream() -> datasets.IterableDataset:
    return table().to_iterable_dataset(num_shards=2).shuffle(seed=3, buffer_size=8)


LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "stateful": lambda: StatefulDataLoader(Augmented(), BATCH, shuffle=True, **KEPT),
    "stateful, own sampler": lambda: StatefulDataLoader(
        Augmented(), BATCH, sampler=StatefulDistributedSampler(Augmented(), 2, 1)
    ),
    "stateful stream": lambda: StatefulDataLoader(Stream(), BATCH, num_workers=2),
    "table": lambda: DataLoader(table().with_transform(augment), BATCH, shuffle=True, **KEPT),
    "stream": lambda: DataLoader(stream().with_format("torch"), BATCH),
    "stream, kept workers": lambda: DataLoader(stream().with_format("torch"), BATCH, **KEPT),
    "stream of batches": lambda: stream().batch(BATCH),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", LOADERS)
def test_batches_do_not_depend_on_where_the_loader_was_opened(name: str) -> None:
    ends = EpochEnds(lambda: None)
    undisturbed = all_batches(feed_of(LOADERS[name](), ends))
    assert len({str(batch) for batch in undisturbed}) == len(undisturbed), "all differ"
    start = len(undisturbed) // EPOCHS + 2
    later = all_batches(feed_of(LOADERS[name](), ends), start)
    assert [str(batch) for batch in later] == [str(batch) for batch in undisturbed[start:]]


class SharedEpoch(IterableDataset[int]):
    """As the streams of Hugging Face: workers that are kept see the epoch in shared memory."""

    def __init__(self) -> None:
        memory: Any = torch.zeros((), dtype=torch.int64)
        self._epoch = memory.share_memory_()

    def set_epoch(self, epoch: int) -> None:
        assert get_worker_info() is None, "two workers at once would both add"
        self._epoch += epoch - self._epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None
        yield from (100 * int(self._epoch) + 10 * info.id + number for number in range(4))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_epoch_in_shared_memory_is_not_set_by_workers() -> None:
    batches = all_batches(feed_of(DataLoader(SharedEpoch(), 4, **KEPT), EpochEnds(lambda: None)))
    firsts = [[int(batch[0]) for batch in batches[2 * epoch :][:2]] for epoch in range(EPOCHS)]
    assert firsts == [[100 * epoch, 100 * epoch + 10] for epoch in range(EPOCHS)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_loader_with_a_loaded_state_is_refused() -> None:
    loader = StatefulDataLoader(Augmented(), BATCH)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(SettingsError, match="start="):
        sources.of(loader)
