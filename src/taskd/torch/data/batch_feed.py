"""The batch of each step: kept while the step may be repeated, and found again in a replacement.

`Job.batches` asks for them by the number of the step. The position of a rank follows from that
number, so nothing has to be saved, and no rank can get the position of another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

from torch.distributed import Store

from taskd.core.worker.epochs import Epochs, Position
from taskd.errors import SettingsError
from taskd.torch import compat
from taskd.torch.context import JobContext
from taskd.torch.data import generators, sources
from taskd.torch.data.epoch_ends import EpochEnds
from taskd.torch.data.generators import Seeds
from taskd.torch.data.given_batch import GivenBatch
from taskd.torch.data.sources import EpochEnded, Source
from taskd.torch.groups import sealed_objects

log = logging.getLogger(__name__)

NOT_KNOWN = -1


class Feed:
    """The batches of one rank."""

    def __init__(self, source: Source, epochs: Epochs, ends: EpochEnds) -> None:
        self._source, self._epochs, self._ends = source, epochs, ends
        self._batches: dict[int, GivenBatch] = {}
        """By step: the present one, and the next one where the length is not known."""
        self._iterator: Iterator[Any] = iter(())
        self._next: Position | None = None
        """The batch that the iterator gives next. None: it has to be opened."""

    def has(self, step: int) -> bool:
        """Whether there is a batch for this step."""
        for old in [number for number in self._batches if number < step]:
            del self._batches[old]
        if self._epochs.length is not None:
            return self._epochs.locate(step) is not None
        while (place := self._epochs.locate(step)) is not None:
            if self._learn_end(place.epoch):
                continue
            if self._load(step, place):
                if self._epochs.end(place.epoch) is None:
                    self._load(step + 1, Position(place.epoch, place.index + 1))
                return True
        return False

    def batch(self, step: int, *, restores: bool = True) -> Any:
        """The batch of this step. `has` was called for it.

        `restores`: what is drawn here does not change the generators of this process. Otherwise
        they are to be seeded afterwards.
        """
        place = self._place(step)
        if not self._load(step, place, restores):
            raise SettingsError(
                [
                    f"the loader has ended after {place.index} batches of epoch {place.epoch}, but "
                    f"its length is {self._epochs.length}"
                ]
            )
        return self._batches[step].give()

    def begin_attempt(self, step: int) -> None:
        """The batch of this step is as it was at the first attempt."""
        if (given := self._batches.get(step)) is not None:
            given.begin_attempt()

    def epoch(self, step: int) -> int:
        return self._place(step).epoch

    def ends_epoch(self, step: int) -> bool:
        """Whether this is the last step of its epoch. Asked after the step."""
        epoch = self._place(step).epoch
        self._learn_end(epoch)
        return self._epochs.end(epoch) == step + 1

    def close(self) -> None:
        """Ends the loader's workers."""
        self._batches.clear()
        self._iterator, self._next = iter(()), None

    def _place(self, step: int) -> Position:
        place = self._epochs.locate(step)
        assert place is not None
        return place

    def _learn_end(self, epoch: int) -> bool:
        """Whether it has just become known that this epoch has ended, on this or another rank."""
        if self._epochs.end(epoch) is not None or (batches := self._ends.read(epoch)) is None:
            return False
        self._epochs = self._epochs.ended(epoch, batches)
        end = self._epochs.start(epoch) + batches
        if any(step >= end for step in self._batches):
            log.info("epoch %d ends early: another rank has only batches=%d", epoch, batches)
            self._batches = {step: given for step, given in self._batches.items() if step < end}
        return True

    def _load(self, step: int, place: Position, restores: bool = True) -> bool:
        """False: the epoch has ended before this batch."""
        if step in self._batches:
            return True
        try:
            batch = self._read(place, restores)
            self._batches[step] = GivenBatch(batch, lambda: self._read_again(place))
        except EpochEnded as ended:
            self._next = None
            if ended.batches == 0:
                raise SettingsError([f"the loader has no batch in epoch {place.epoch}"]) from None
            if self._epochs.length is None and self._epochs.end(place.epoch) is None:
                self._ends.write(place.epoch, ended.batches)
                self._learn_end(place.epoch)
            return False
        return True

    def _read_again(self, place: Position) -> Any:
        with generators.restored():
            equal = self._source.read_again(place.epoch, place.index)
        if equal is None:
            log.info(
                "epoch %d is opened again at batch %d, because the step has changed its batch",
                place.epoch,
                place.index,
            )
            self._next = None
            equal = self._read(place)
        return equal

    def _read(self, place: Position, restores: bool = True) -> Any:
        with generators.restored() if restores else nullcontext():
            if place != self._next:
                if place.index == 0 and self._next is not None:
                    next(self._iterator, None)  # a sampler may have something to do at its end
                self._next = None
                self._iterator = self._source.open(place.epoch, place.index)
            try:
                batch = next(self._iterator)
            except StopIteration:
                raise EpochEnded(place.index) from None
        self._next = Position(place.epoch, place.index + 1)
        return batch


def open_feed(
    loader: Iterable[Any],
    epochs: int | None,
    context: JobContext,
    store: Callable[[], Store | None],
) -> Feed:
    """Call it on all ranks, before the first step."""
    if id(loader) in map(id, context.protected.parts.values()):
        raise SettingsError(
            ["the loader was given to protect() and to batches(): leave it out of protect()"]
        )
    compat.check_data()
    source = sources.of(loader)
    base = context.base_seeds
    seeds = Seeds(base.torch, base.python, base.numpy, source.fingerprint())
    common = seeds
    lengths = [NOT_KNOWN if source.length is None else source.length]
    if context.world_size > 1:
        # In a replacement, both are those of its predecessor, also if the script sets no seed.
        gathered = sealed_objects.gather_numbers([*lengths, *seeds.numbers()])
        lengths = [length for length, *_ in gathered]
        seeds = Seeds.of_numbers(gathered[context.rank][1:])
        common = Seeds.of_numbers(gathered[0][1:])
    source.seed(seeds, common)
    length = None if NOT_KNOWN in lengths else min(lengths)
    if length == 0:
        raise SettingsError(["batches(): the loader has no batches"])
    if length is not None and max(lengths) > length:
        log.warning(
            "ranks have different numbers of batches: every epoch ends after batches=%d", length
        )
    return Feed(source, Epochs(epochs, length), EpochEnds(store))
