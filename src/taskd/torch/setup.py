"""What the collectives of a script's set-up gave, so that a replacement gets the same.

A replacement runs the script from its first line, alone. A seed that rank 0 has sent round, a flag
that all have agreed on, an object that was broadcast: its predecessor got them from its peers, who
are far beyond by now. So each rank writes down, until its first step, what every collective left
in its outputs, and puts that into the job's store; its replacement reads it back, call by call.
Large results are left out: they are weights, and those come from a peer anyway. `group.py` asks.
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

from taskd.torch.alone import flat
from taskd.torch.sealed import seal, unseal
from taskd.torch.works import NO_TIMEOUT

log = logging.getLogger(__name__)

LARGE = 1 << 16
"""Bytes of one collective from which on it is not written down."""
ALL = 4 << 20
"""Bytes that one rank writes down at most."""
MOST = 10_000
"""Collectives, beyond which this is no set-up any more."""
WITHOUT_RESULT = {"send", "recv", "recv_anysource", "barrier"}

Call = tuple[str, int]
"""The group, and the how-manieth of its collectives."""


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    outputs: list[torch.Tensor] | None
    """None: too large to be written down."""


class Setup:
    """Of one process: it writes down, or reads back, or its script is past its set-up."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._given: dict[Call, Result] = {}
        self._size = 0
        self._over = False
        self._warned = False

    # Of the first life

    def keep(self, group: str, name: str, args: tuple[Any, ...], work: dist.Work) -> dist.Work:
        """A handle that writes the result down when it is waited for."""
        if self._over or work is None:
            return work
        call = self._count(group)
        return work if name in WITHOUT_RESULT else Kept(self, call, name, flat(args[0]), work)

    def note(self, call: Call, name: str, outputs: list[torch.Tensor]) -> None:
        size = sum(one.nbytes for one in outputs)
        if len(self._given) > MOST:
            self._over, self._given = True, {}  # a script that has no steps
            return
        if self._over or self._size + size > ALL or size > LARGE:
            self._given[call] = Result(name, None)
            return
        self._size += size
        self._given[call] = Result(name, [one.detach().cpu().clone() for one in outputs])

    def publish(self, store: Store, rank: int) -> None:
        """The first step begins."""
        if not self._over:
            self._over = True
            store.set(f"setup/{rank}", seal(self._given))  # type: ignore[arg-type]
            self._given = {}

    # Of a replacement

    def read(self, store: Store, rank: int) -> None:
        """What our predecessor got. Nothing, if it was lost before its first step."""
        if store.check([f"setup/{rank}"]):
            self._given = unseal(store.get(f"setup/{rank}"))

    def recall(self, group: str, name: str, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """Give the outputs what they were given then. None: that is not known."""
        if self._over:
            return None
        call = self._count(group)
        if name in WITHOUT_RESULT:
            return None
        known, outputs = self._given.get(call), flat(args[0])
        if known is not None and known.outputs is None:
            return None
        if known is None or known.name != name or not _fit(known.outputs, outputs):
            self._warn(call, name)
            return None
        for place, value in zip(outputs, known.outputs or (), strict=True):
            place.copy_(value)
        return outputs

    def _count(self, group: str) -> Call:
        self._calls[group] += 1
        return group, self._calls[group]

    def _warn(self, call: Call, name: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "this rank joins a job that has begun, and its set-up takes another way than the "
                "one before it: %s, number %d of group %r, sees only this rank's own data. "
                "Make the set-up the same in every life, or exchange such things after steps() "
                "has begun",
                name,
                call[1],
                call[0],
            )


class Kept(dist.Work):
    """A collective outside of any step: it fails natively, and is written down when it is done."""

    def __init__(
        self, setup: Setup, call: Call, name: str, outputs: list[torch.Tensor], inner: dist.Work
    ) -> None:
        super().__init__()
        self._setup, self._call, self._name = setup, call, name
        self._outputs, self._inner = outputs, inner

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        done = self._inner.wait(timeout)
        self._setup.note(self._call, self._name, self._outputs)
        return done

    def get_future(self) -> Future[Any]:
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return self._inner.is_completed()

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


def _fit(known: list[torch.Tensor] | None, outputs: list[torch.Tensor]) -> bool:
    return known is not None and [(one.shape, one.dtype) for one in known] == [
        (one.shape, one.dtype) for one in outputs
    ]
