"""The batch of a step does not depend on where a loader was opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from taskd.core.worker.epochs import Epochs
from taskd.errors import SettingsError
from taskd.torch.data import sources
from taskd.torch.data.batch_feed import Feed
from taskd.torch.data.epoch_ends import EpochEnds
from taskd.torch.data.generators import Seeds
from tests.unit.torch.data.loaders import LOADERS

EPOCHS = 3
SEEDS = Seeds(b"torch", b"python", b"numpy", b"own")


class Numbers:
    """A source of numbers."""

    length: int | None = None

    def __init__(self, size: int) -> None:
        self._size = size
        self.opened: list[int] = []

    def fingerprint(self) -> bytes:
        return b""

    def seed(self, seeds: Seeds, common: Seeds) -> None: ...

    def open(self, epoch: int, skip: int) -> Iterator[int]:
        self.opened.append(epoch)
        return iter(range(self._size)[skip:])

    def read_again(self, epoch: int, number: int) -> None:
        return None


def feed(name: str, ends: EpochEnds | None = None) -> Feed:
    return feed_of(LOADERS[name](), ends)


def feed_of(loader: Iterable[Any], ends: EpochEnds | None = None) -> Feed:
    source = sources.of(loader)
    source.seed(SEEDS, SEEDS)
    return Feed(source, Epochs(EPOCHS, source.length), ends or EpochEnds(lambda: None))


def all_batches(one: Feed, start: int = 0) -> list[Any]:
    batches: list[Any] = []
    while one.has(start + len(batches)):
        batches.append(one.batch(start + len(batches)))
    one.close()
    return batches


@pytest.mark.parametrize("name", LOADERS)
def test_batches_do_not_depend_on_where_the_loader_was_opened(name: str) -> None:
    torch.manual_seed(0)
    ends = EpochEnds(lambda: None)
    undisturbed = all_batches(feed(name, ends))
    drawn = torch.rand(3)
    assert len(undisturbed) % EPOCHS == 0
    length = len(undisturbed) // EPOCHS
    if "list" not in name:
        assert len({str(batch) for batch in undisturbed}) == len(undisturbed), "all differ"
    for start in (1, length + 2, 3 * length - 1):
        torch.manual_seed(start)
        later = all_batches(feed(name, ends), start)
        for expected, batch in zip(undisturbed[start:], later, strict=True):
            assert torch.equal(expected, batch)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3)), "a loader does not disturb the script's numbers"


def test_epoch_ends_for_all_ranks_when_the_first_has_no_more() -> None:
    """In each step, the longer rank comes first; the shorter one writes before they meet."""
    store = HashStore()
    long, short = (
        Feed(Numbers(size), Epochs(2, None), EpochEnds(lambda: store)) for size in (5, 3)
    )
    steps = 0
    while short.has(steps):
        assert long.has(steps)
        assert [long.batch(steps), short.batch(steps)] == [steps % 3] * 2
        assert long.ends_epoch(steps) == short.ends_epoch(steps) == (steps % 3 == 2)
        assert long.epoch(steps) == steps // 3
        steps += 1
    assert steps == 6
    assert not long.has(steps)


def test_replacement_finds_its_epoch_in_the_store() -> None:
    store = HashStore()
    undisturbed = all_batches(Feed(Numbers(3), Epochs(4, None), EpochEnds(lambda: store)))
    source = Numbers(3)
    later = all_batches(Feed(source, Epochs(4, None), EpochEnds(lambda: store)), start=7)
    assert later == undisturbed[7:]
    assert source.opened == [2, 3]


def test_position_is_read_where_the_store_does_not_know_it() -> None:
    undisturbed = all_batches(feed("iterable"))
    later = all_batches(feed("iterable"), start=7)
    assert [batch.tolist() for batch in later] == [batch.tolist() for batch in undisturbed[7:]]


@pytest.mark.parametrize("name", ["kept workers", "lazy sampler", "stream"])
def test_job_that_goes_back_gets_the_earlier_batch(name: str) -> None:
    one = feed(name)
    batches = [one.batch(step).clone() for step in range(9) if one.has(step)]
    for step in (4, 5, 6, 2):
        assert one.has(step)
        assert torch.equal(one.batch(step), batches[step])
    one.close()


@pytest.mark.parametrize("name", ["shuffled", "workers", "stream"])
def test_attempt_that_changes_its_batch_in_place_gets_it_back(name: str) -> None:
    expected = all_batches(feed(name))[3]
    one = feed(name)
    assert all(one.has(step) and one.batch(step) is not None for step in range(4))
    batch = one.batch(3)
    one.begin_attempt(3)
    batch.add_(1.0)
    one.begin_attempt(3)
    assert torch.equal(batch, expected)
    batch.mul_(2.0)
    assert one.batch(3) is batch, "`with step:` is yielded again"
    assert torch.equal(batch, expected)
    assert one.has(4)
    assert torch.equal(one.batch(4), all_batches(feed(name), 4)[0]), "and the next one is right"
    one.close()


def test_empty_loader_is_refused() -> None:
    with pytest.raises(SettingsError, match="no batch in epoch 0"):
        Feed(Numbers(0), Epochs(1, None), EpochEnds(lambda: None)).has(0)


def test_iterator_cannot_be_iterated_again() -> None:
    source = sources.of(iter([1, 2]))
    source.seed(SEEDS, SEEDS)
    one = Feed(source, Epochs(2, None), EpochEnds(lambda: None))
    with pytest.raises(SettingsError, match="can be iterated only once"):
        all_batches(one)
