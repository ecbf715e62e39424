"""Where batches come from: a loader that can be opened at any batch of any epoch.

The script's own loader is not iterated. A `DataLoader` is built again, with the same dataset,
sampler and workers, so that it can start in the middle of an epoch and seed every batch. Anything
else is read from the beginning of the epoch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from taskd.errors import SettingsError
from taskd.runtime.clock import monotonic
from taskd.torch import compat
from taskd.torch.data import generators
from taskd.torch.data.generators import Seeds
from taskd.torch.data.seeded_datasets import (
    BatchIndex,
    SeededDataset,
    SeededStream,
    has_shared_epoch,
    set_epoch,
)

log = logging.getLogger(__name__)

NOTABLE_S = 1.0
"""Reading up to a batch is reported if it takes longer."""


class EpochEnded(Exception):
    """An epoch has no batch at the place that was asked for."""

    def __init__(self, batches: int) -> None:
        super().__init__(f"the epoch has {batches} batches")
        self.batches = batches


class Source(Protocol):
    """The batches of one rank."""

    length: int | None
    """How many batches every epoch has. None: not known before its end."""

    def fingerprint(self) -> bytes:
        """A hash of what its random numbers start from."""

    def seed(self, seeds: Seeds, common: Seeds) -> None:
        """All random numbers come from here. Called once, before `open`.

        `common` are the same on all ranks, for an order that they share.
        """

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        """The batches of an epoch after the first few. Call it with random numbers restored.

        Raises:
            EpochEnded: The epoch has not as many as are to be skipped.
        """

    def read_again(self, epoch: int, number: int) -> Any | None:
        """An equal batch, read in this process. None: it has to be opened again for that."""


def of(loader: Iterable[Any]) -> Source:
    """The source that suits this loader."""
    kind = type(loader)
    if kind.__module__.partition(".")[0] == "accelerate":
        return PreparedSource(loader)
    if not isinstance(loader, DataLoader) or not _is_plain(kind):
        return IterableSource(loader)
    return _of_plain(loader)


def _of_plain(loader: DataLoader[Any], is_shared: bool = False) -> MapSource | StreamSource:
    """`is_shared`: the ranks draw one order, and each takes its part."""
    if getattr(loader, "next_iter_state", None) is not None:
        raise SettingsError(
            [
                f"batches() cannot use a {type(loader).__name__} with a loaded state: it finds the "
                "position from the number of the step. Pass batches(start=…) instead"
            ]
        )
    if isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, is_shared)
    return MapSource(loader, is_shared)


def _is_plain(kind: Any) -> bool:
    """Whether it iterates as torch's DataLoader does. StatefulDataLoader only adds its state."""
    if any(base.__module__.startswith("torchdata.stateful_dataloader") for base in kind.__mro__):
        return True
    return compat.iterates_as_data_loader(kind)


class MapSource:
    """A loader of a map-style dataset: starts at any batch, and reads no sample in vain."""

    def __init__(self, loader: DataLoader[Any], is_shared: bool = False) -> None:
        """`is_shared`: the sampler of each rank draws for all, and takes the part of its rank."""
        self._loader, self._is_shared = loader, is_shared
        self._sampler: Any = (
            loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        )
        self._samplers = _samplers(self._sampler)
        self.length = _length(self._sampler)

    def fingerprint(self) -> bytes:
        own = generators.find([self._samplers, self._loader.generator, self._loader.dataset])
        return generators.fingerprint(own)

    def seed(self, seeds: Seeds, common: Seeds) -> None:
        loader = self._loader
        self._dataset = SeededDataset(loader.dataset, _in_process(loader, seeds))
        self._indices = IndexSampler(self._samplers, common if self._is_shared else seeds)
        how: dict[str, Any] = {"batch_sampler": self._indices}
        if loader.batch_sampler is None:
            how = {"sampler": self._indices, "batch_size": None}
        self._live = _rebuilt(loader, self._dataset, **how)

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        self._indices.seek(epoch, skip)
        generators.seed_process(self._indices.seeds)
        return iter(self._live)

    def read_again(self, epoch: int, number: int) -> Any | None:
        index = self._indices.recent.get(number)
        if index is None or index.epoch != epoch:
            return None
        fetched = (
            self._dataset[index]
            if self._loader.batch_sampler is None
            else self._dataset.__getitems__(index)
        )
        collate: Callable[[Any], Any] = self._loader.collate_fn
        return collate(fetched)


class IndexSampler:
    """The sampler of the script, from any batch on."""

    RECENT = 1000
    """How many batches are remembered: more than a loader asks for in advance."""

    def __init__(self, samplers: list[Any], seeds: Seeds) -> None:
        self._samplers, self.seeds = samplers, seeds
        self._drawn: Iterator[Any] = iter(())
        self._epoch, self._number, self._expected = 0, 0, 0
        self._initial = [dict(getattr(one, "__dict__", {})) for one in samplers]
        self.recent: dict[int, BatchIndex] = {}

    def seek(self, epoch: int, skip: int) -> None:
        """The next iteration begins at this batch."""
        if epoch != self._expected and any(map(_keeps_count, self._samplers)):
            for one, attributes in zip(self._samplers, self._initial, strict=True):
                vars(one).update(attributes)
            for earlier in range(epoch):
                for _ in self._draw(earlier):
                    pass
        self._expected = epoch + 1
        self._drawn = self._draw(epoch)
        skipped = sum(1 for _ in itertools.islice(self._drawn, skip))
        if skipped < skip:
            raise EpochEnded(skipped)
        self._epoch, self._number = epoch, skip
        self.recent.clear()

    def __iter__(self) -> Iterator[BatchIndex]:
        for number, indices in enumerate(self._drawn, self._number):
            index = self.recent[number] = BatchIndex(indices, self._epoch, number)
            self.recent.pop(number - self.RECENT, None)
            yield index

    def _draw(self, epoch: int) -> Iterator[Any]:
        found = generators.find(self._samplers)

        def seed(*parts: int | str) -> None:
            seeds = self.seeds.of("sampler", epoch, *parts)
            generators.seed_process(seeds)
            generators.reseed(found, seeds)

        for one in self._samplers:
            set_epoch(one, epoch)
        seed("begin")
        drawn = iter(self._samplers[0])
        for number in itertools.count():
            seed(number)
            try:
                yield next(drawn)
            except StopIteration:
                return


class StreamSource:
    """A loader of an iterable dataset: reads from the beginning of the epoch."""

    length: int | None = None

    def __init__(self, loader: DataLoader[Any], is_shared: bool = False) -> None:
        """`is_shared`: each rank reads the whole stream, and takes the part of its rank."""
        self._loader, self._is_shared = loader, is_shared

    def fingerprint(self) -> bytes:
        return generators.fingerprint(
            generators.find([self._loader.generator, self._loader.dataset])
        )

    def seed(self, seeds: Seeds, common: Seeds) -> None:
        self._seeds = _in_process(self._loader, common if self._is_shared else seeds)
        self._live: DataLoader[Any] | None = None
        self._expected = 0

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        loader = self._loader
        if self._live is None or epoch != self._expected:
            # Workers that are kept count the epochs, so another epoch needs other workers.
            self._dataset = SeededStream(loader.dataset, self._seeds, loader.batch_size)
            self._live = _rebuilt(
                loader, self._dataset, batch_size=loader.batch_size, drop_last=loader.drop_last
            )
        self._expected = epoch + 1
        if has_shared_epoch(loader.dataset):
            set_epoch(loader.dataset, epoch)
        self._dataset.begin_at(epoch)
        generators.seed_process(self._seeds)
        return _skipped(iter(self._live), epoch, skip)

    def read_again(self, epoch: int, number: int) -> Any | None:
        return None


class IterableSource:
    """Any other iterable of batches."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.length = len(loader) if isinstance(loader, Sequence) else None
        self._is_used = False
        if getattr(loader, "persistent_workers", False):
            log.warning(
                "%s iterates in its own way and keeps its workers from epoch to epoch: what they "
                "draw at random in a replacement differs. Use persistent_workers=False",
                type(loader).__name__,
            )

    def fingerprint(self) -> bytes:
        return generators.fingerprint(generators.find(self._loader))

    def seed(self, seeds: Seeds, common: Seeds) -> None:
        self._seeds = seeds

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        loader = self._loader
        for owner in (loader, *(getattr(loader, name, None) for name in ("sampler", "dataset"))):
            set_epoch(owner, epoch)
        seeds = self._seeds.of("stream", epoch)
        generators.seed_process(seeds)
        if not isinstance(loader, Sequence):
            generators.reseed(generators.find(loader), seeds)
        batches = iter(loader)
        if batches is loader:
            if self._is_used or epoch:
                raise SettingsError(
                    [
                        f"batches() needs another iteration of a {type(loader).__name__}, which "
                        "can be iterated only once: give it an iterable, such as a list, a "
                        "DataLoader or an object whose __iter__ begins again"
                    ]
                )
            self._is_used = True
        return _skipped(self._seeded(batches, seeds), epoch, skip)

    def _seeded(self, batches: Iterator[Any], seeds: Seeds) -> Iterator[Any]:
        for number in itertools.count():
            generators.seed_process(seeds.of(number))
            try:
                yield next(batches)
            except StopIteration:
                return

    def read_again(self, epoch: int, number: int) -> Any | None:
        return None


class PreparedSource:
    """A loader that Accelerate has prepared: it gives each rank its part, on its device.

    Accelerate exchanges random state between the ranks in each epoch, so that all draw the same
    order. Here they draw it from common seeds, and exchange nothing.
    """

    def __init__(self, loader: Any) -> None:
        kind = type(loader).__name__
        if kind != "DataLoaderShard" or loader.skip_batches:
            raise SettingsError(
                [
                    f"batches() cannot use Accelerate's {kind}: one rank reads for all, or batches "
                    "are skipped. Use DataLoaderConfiguration(dispatch_batches=False) and "
                    "batches(start=…)"
                ]
            )
        if loader.gradient_state.num_steps > 1:
            raise SettingsError(
                [
                    "batches() cannot be used with Accelerator(gradient_accumulation_steps=…): it "
                    "counts batches, and a replacement would begin to count at 0. Do all backward "
                    "passes of an update in one step"
                ]
            )
        self._inner = _of_plain(loader.base_dataloader, is_shared=True)
        self._loader = loader
        self.length = self._inner.length

    def fingerprint(self) -> bytes:
        return self._inner.fingerprint()

    def seed(self, seeds: Seeds, common: Seeds) -> None:
        self._inner.seed(seeds, common)

    def open(self, epoch: int, skip: int) -> Iterator[Any]:
        return map(self._moved, self._inner.open(epoch, skip))

    def read_again(self, epoch: int, number: int) -> Any | None:
        batch = self._inner.read_again(epoch, number)
        return None if batch is None else self._moved(batch)

    def _moved(self, batch: Any) -> Any:
        if self._loader.device is None:
            return batch
        from accelerate.utils import send_to_device

        return send_to_device(batch, self._loader.device)


def _in_process(loader: DataLoader[Any], seeds: Seeds) -> Seeds:
    """The seeds in the processes that read the dataset."""
    return seeds.in_workers() if loader.num_workers else seeds


def _skipped(batches: Iterator[Any], epoch: int, skip: int) -> Iterator[Any]:
    """Read and drop the first few batches."""
    started = monotonic()
    skipped = sum(1 for _ in itertools.islice(batches, skip))
    if skipped < skip:
        raise EpochEnded(skipped)
    if (took := monotonic() - started) > NOTABLE_S:
        log.info(
            "data was read again to batch %d of epoch %d, because an iterable dataset has no other "
            "way to get there: seconds=%.1f",
            skip,
            epoch,
            took,
        )
    return batches


def _rebuilt(loader: DataLoader[Any], dataset: Any, **how: Any) -> DataLoader[Any]:
    """A loader like this one, with another dataset and sampler."""
    if not getattr(loader, "in_order", True):
        log.warning(
            "DataLoader(in_order=False) is ignored: a replacement needs the batches in the same "
            "order"
        )
    if loader.num_workers:
        how |= {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    if loader.pin_memory_device:
        how["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        **how,
    )


def _samplers(first: Any) -> list[Any]:
    """A sampler and those inside it."""
    found: list[Any] = []
    one = first
    while one is not None and not any(one is known for known in found):
        found.append(one)
        one = getattr(one, "sampler", None) or getattr(one, "batch_sampler", None)
    return found


def _keeps_count(sampler: Any) -> bool:
    """Whether its order may depend on how often it was iterated before."""
    return not (type(sampler).__module__.startswith("torch.") or hasattr(sampler, "set_epoch"))


def _length(sampler: Any) -> int | None:
    measure: Callable[[Any], int] = len
    try:
        return measure(sampler)
    except (TypeError, NotImplementedError):
        return None
