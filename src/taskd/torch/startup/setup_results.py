"""The results of the collectives in a script's set-up, so that a replacement gets the same ones.

A replacement runs the script from its first line, alone. A seed that rank 0 has broadcast, a flag
that all ranks have agreed on: its predecessor got them from its peers, which are far beyond by now.
So until its first step each rank saves in the job's store what every collective has put into its
outputs; its replacement reads it back, call by call. Large floating-point outputs are left out:
they are weights, and come from a peer anyway. `groups/resilient_group.py` calls this.

The store can be lost with its node, if another node can lead the job. Then each rank also keeps its
own results and those of a rank on another node (`setup_copies.py`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.futures import Future

from taskd.torch import compat
from taskd.torch.groups.solo_results import flatten
from taskd.torch.groups.works import NO_TIMEOUT
from taskd.torch.startup.setup_copies import SetupCopies
from taskd.torch.state.pieces import raw_bytes
from taskd.torch.state.sealed import in_this_attempt, seal, unseal

log = logging.getLogger(__name__)

WEIGHTS_BYTES = 1 << 16
"""A floating-point collective of more bytes carries weights."""
MAX_BYTES = 16 << 20
"""What one rank saves at most."""
MAX_CALLS = 1000
"""A script that makes more collectives than this is not in its set-up any more."""
WITHOUT_RESULT = {"send", "barrier"}

Call = tuple[str, int]
"""The group, and the number of the collective in it."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor in a simple form: torch's own takes a replacement milliseconds to read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> SavedTensor:
        data = raw_bytes(tensor.detach().cpu()).numpy().tobytes()
        return SavedTensor(tuple(tensor.shape), tensor.dtype, data)

    def fits(self, target: torch.Tensor) -> bool:
        return (self.shape, self.dtype) == (tuple(target.shape), target.dtype)

    def copy_to(self, target: torch.Tensor) -> None:
        if self.data:
            value = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            target.copy_(value.view(self.dtype).reshape(self.shape))


@dataclass(frozen=True, slots=True)
class SetupResult:
    """The outputs of one collective."""

    name: str
    outputs: list[SavedTensor] | None
    """None: left out."""
    weights: bool
    """They are weights, so a replacement does not need them."""


class SetupResults:
    """Records the set-up of this process, or replays that of its predecessor. Off until `start`."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._prefix = ""
        self._calls: Counter[str] = Counter()
        self._size = 0
        self._warned = False
        self._local = threading.local()
        self.copies: SetupCopies | None = None
        """None: the store is not lost with a node."""

    def start(self, store: Store, rank: int) -> None:
        self._store, self._prefix = store, f"setup/{rank}"

    def stop(self) -> None:
        """The first step begins."""
        store, self._store = self._store, None
        if store is not None and self.copies is not None:
            self.copies.set_up_done(store)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives of this thread in here are neither recorded nor counted: see `dcp.py`."""
        before = self._is_paused
        self._local.paused = True
        try:
            yield
        finally:
            self._local.paused = before

    @property
    def _is_paused(self) -> bool:
        return bool(getattr(self._local, "paused", False))

    # In the first incarnation

    def record(
        self, group: str, name: str, args: tuple[Any, ...], work: dist.Work | None
    ) -> dist.Work | None:
        """A handle that saves the result as soon as it is complete."""
        if self._store is None or self._is_paused:
            return work
        call = self._count(group)
        if name in WITHOUT_RESULT:
            return work
        if work is None:  # it is in the caller's stream, and so are we
            self.save(call, name, flatten(args[0]))
            return None
        return RecordedWork(self, call, name, flatten(args[0]), work)

    def save(self, call: Call, name: str, outputs: list[torch.Tensor]) -> None:
        store = self._store
        if store is None:
            return
        try:
            key = self._key(call)
            sealed = seal(self._result(name, outputs), in_this_attempt(key))
            store.set(key, sealed)  # type: ignore[arg-type]
            if self.copies is not None:
                self.copies.keep(key, sealed)
        except RuntimeError as error:
            log.warning("cannot save the results of the set-up for a replacement: %s", error)
            self.stop()

    def _result(self, name: str, outputs: list[torch.Tensor]) -> SetupResult:
        if any(one.layout != torch.strided for one in outputs):
            return SetupResult(name, None, weights=False)
        size = sum(one.nbytes for one in outputs)
        weights = size > WEIGHTS_BYTES and all(one.is_floating_point() for one in outputs)
        if weights or self._size + size > MAX_BYTES:
            return SetupResult(name, None, weights)
        self._size += size
        return SetupResult(name, [SavedTensor.of(one) for one in outputs], weights)

    # In a replacement

    @torch.no_grad()
    def replay(self, group: str, name: str, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """Fill the outputs as in the predecessor. None: its result is not known."""
        if self._store is None:
            return None
        call = self._count(group)
        if name in WITHOUT_RESULT or self._store is None:
            return None
        known, outputs = self._read(call), flatten(args[0])
        if known is not None and known.weights:
            return None
        if known is None:
            self._warn(call, name, "it was not saved")
        elif known.outputs is None:
            self._warn(call, name, "it was too large, or sparse")
        elif known.name != name or not _fit(known.outputs, outputs):
            self._warn(call, name, f"the predecessor made another call, {known.name}")
        else:
            for target, value in zip(outputs, known.outputs, strict=True):
                value.copy_to(target)
            return outputs
        return None

    def knows(self, group: str, names: list[str]) -> bool:
        """Whether the predecessor's next calls in this group had these names and known results."""
        if self._store is None:
            return False
        for number, name in enumerate(names, self._calls[group] + 1):
            known = self._read((group, number))
            if known is None or known.name != name or known.outputs is None:
                return False
        return True

    def _read(self, call: Call) -> SetupResult | None:
        key = self._key(call)
        if self._store is None or not self._store.check([key]):
            return None
        sealed = self._store.get(key)
        result: SetupResult = unseal(sealed, in_this_attempt(key))
        if self.copies is not None:
            self.copies.keep(key, sealed)
        return result

    def _key(self, call: Call) -> str:
        return f"{self._prefix}/{call[0]}/{call[1]}"

    def _count(self, group: str) -> Call:
        self._calls[group] += 1
        if self._calls.total() > MAX_CALLS:
            self.stop()  # a script without steps
        return group, self._calls[group]

    def _warn(self, call: Call, name: str, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "this rank joins a running job, and the result of %s, number %d in group %r, is "
                "not known: %s. The call returns only this rank's own data. Make the set-up the "
                "same in every incarnation, or exchange such values after steps() has begun",
                name,
                call[1],
                call[0],
                why,
            )


class RecordedWork(dist.Work):
    """A collective outside any step: it can raise, and its result is saved when it is complete."""

    def __init__(
        self,
        results: SetupResults,
        call: Call,
        name: str,
        outputs: list[torch.Tensor],
        inner: dist.Work,
    ) -> None:
        super().__init__()
        self._results, self._call, self._name = results, call, name
        self._outputs, self._inner = outputs, inner
        self._is_saved = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        done = self._inner.wait(timeout)
        self._save()
        return done

    def get_future(self) -> Future[Any]:
        def save(future: Future[Any]) -> Any:
            value = future.value()
            self._save()
            return value

        return self._inner.get_future().then(save)

    def is_completed(self) -> bool:
        done = self._inner.is_completed()
        if done and self._inner.is_success():
            self._save()
        return done

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> Any:
        return self._inner.exception()

    def result(self) -> list[torch.Tensor]:
        return self._inner.result()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()
        self._save()

    def _source_rank(self) -> int:
        return compat.source_rank(self._inner)

    def _save(self) -> None:
        if not self._is_saved:
            self._is_saved = True
            self._results.save(self._call, self._name, self._outputs)


def _fit(known: list[SavedTensor], outputs: list[torch.Tensor]) -> bool:
    return len(known) == len(outputs) and all(map(SavedTensor.fits, known, outputs))
