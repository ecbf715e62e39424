"""What the collectives of a script's set-up gave, so that a replacement gets the same.

A replacement runs the script from its first line, alone. A seed that rank 0 has sent round, a flag
that all have agreed on, an object that was broadcast: its predecessor got them from its peers, who
are far beyond by now. So each rank leaves in the job's store, until its first step, what every
collective has put into its outputs; its replacement reads it back, call by call. Large numbers
with fractions are left out: they are weights, and come from a peer anyway. `group.py` asks.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.futures import Future

from taskd.torch.groups.solo_results import flat
from taskd.torch.groups.works import NO_TIMEOUT
from taskd.torch.state.raw_bytes import raw
from taskd.torch.state.sealed import seal, unseal

log = logging.getLogger(__name__)

LARGE = 1 << 16
"""Bytes of one collective from which on it carries weights, if it carries fractions."""
ALL = 16 << 20
"""Bytes that one rank leaves at most."""
MOST = 1000
"""Collectives, beyond which this is no set-up any more."""
WITHOUT_RESULT = {"send", "barrier"}

Call = tuple[str, int]
"""The group, and the how-manieth of its collectives."""


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor in its simplest form: torch's own takes a replacement milliseconds to read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    data: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Output:
        data = raw(tensor.detach().cpu()).numpy().tobytes()
        return Output(tuple(tensor.shape), tensor.dtype, data)

    def fits(self, place: torch.Tensor) -> bool:
        return (self.shape, self.dtype) == (tuple(place.shape), place.dtype)

    def into(self, place: torch.Tensor) -> None:
        if self.data:
            value = torch.frombuffer(bytearray(self.data), dtype=torch.uint8)
            place.copy_(value.view(self.dtype).reshape(self.shape))


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    outputs: list[Output] | None
    """None: left out."""
    weights: bool
    """So nobody misses it."""


class Setup:
    """Of one process, whose script is past its set-up until `begin` is called."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._place = ""
        self._calls: Counter[str] = Counter()
        self._size = 0
        self._warned = False

    def begin(self, store: Store, rank: int) -> None:
        self._store, self._place = store, f"setup/{rank}"

    def end(self) -> None:
        """The first step begins."""
        self._store = None

    # Of the first life

    def keep(
        self, group: str, name: str, args: tuple[Any, ...], work: dist.Work | None
    ) -> dist.Work | None:
        """A handle that writes the result down once it is there."""
        if self._store is None:
            return work
        call = self._count(group)
        if name in WITHOUT_RESULT:
            return work
        if work is None:  # it is in the stream that the caller works in, and so are we
            self.note(call, name, flat(args[0]))
            return None
        return Kept(self, call, name, flat(args[0]), work)

    def note(self, call: Call, name: str, outputs: list[torch.Tensor]) -> None:
        store = self._store
        if store is None:
            return
        try:
            store.set(self._key(call), seal(self._result(name, outputs)))  # type: ignore[arg-type]
        except RuntimeError as error:
            log.warning("what this rank's set-up agreed on cannot be left for others: %s", error)
            self.end()

    def _result(self, name: str, outputs: list[torch.Tensor]) -> Result:
        if any(one.layout != torch.strided for one in outputs):
            return Result(name, None, weights=False)
        size = sum(one.nbytes for one in outputs)
        weights = size > LARGE and all(one.is_floating_point() for one in outputs)
        if weights or self._size + size > ALL:
            return Result(name, None, weights)
        self._size += size
        return Result(name, [Output.of(one) for one in outputs], weights)

    # Of a replacement

    @torch.no_grad()
    def recall(self, group: str, name: str, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """Give the outputs what they were given then. None: that is not known."""
        if self._store is None:
            return None
        call = self._count(group)
        if name in WITHOUT_RESULT or self._store is None:
            return None
        key, outputs = self._key(call), flat(args[0])
        known: Result | None = None
        if self._store.check([key]):
            known = unseal(self._store.get(key))
        if known is not None and known.weights:
            return None
        if known is None:
            self._warn(call, name, "it left nothing")
        elif known.outputs is None:
            self._warn(call, name, "that was too large, or sparse")
        elif known.name != name or not _fit(known.outputs, outputs):
            self._warn(call, name, f"that was another call, {known.name}")
        else:
            for place, value in zip(outputs, known.outputs, strict=True):
                value.into(place)
            return outputs
        return None

    def _key(self, call: Call) -> str:
        return f"{self._place}/{call[0]}/{call[1]}"

    def _count(self, group: str) -> Call:
        self._calls[group] += 1
        if self._calls.total() > MOST:
            self.end()  # a script that has no steps
        return group, self._calls[group]

    def _warn(self, call: Call, name: str, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "this rank joins a job that has begun, and what %s, number %d of group %r, gave "
                "its predecessor is not known: %s. It sees only this rank's own data. Make the "
                "set-up the same in every life, or exchange such things after steps() has begun",
                name,
                call[1],
                call[0],
                why,
            )


class Kept(dist.Work):
    """A collective outside of any step: it fails natively, and is written down when it is done."""

    def __init__(
        self, setup: Setup, call: Call, name: str, outputs: list[torch.Tensor], inner: dist.Work
    ) -> None:
        super().__init__()
        self._setup, self._call, self._name = setup, call, name
        self._outputs, self._inner = outputs, inner
        self._is_noted = False

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        done = self._inner.wait(timeout)
        self._note()
        return done

    def get_future(self) -> Future[Any]:
        def note(future: Future[Any]) -> Any:
            told = future.value()
            self._note()
            return told

        return self._inner.get_future().then(note)

    def is_completed(self) -> bool:
        done = self._inner.is_completed()
        if done and self._inner.is_success():
            self._note()
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
        self._note()

    def _source_rank(self) -> int:
        return self._inner._source_rank()

    def _note(self) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._setup.note(self._call, self._name, self._outputs)


def _fit(known: list[Output], outputs: list[torch.Tensor]) -> bool:
    return len(known) == len(outputs) and all(map(Output.fits, known, outputs))
