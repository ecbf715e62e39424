"""How ranks learn that an epoch has ended, where no rank knows its length before.

A rank that has no more data writes so into the job's store before it begins its last step of the
epoch. The others look there before each step. They have finished that last step together, so they
see it in time, and all ranks end the epoch with the same step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch.distributed import Store

log = logging.getLogger(__name__)

Connect = Callable[[], Store | None]


class EpochEnds:
    """The ends that ranks have written, as numbers of batches."""

    def __init__(self, store: Connect) -> None:
        """`store`: the present one, which may replace another. None: there is only one rank."""
        self._store = store
        self._own: dict[int, int] = {}

    def read(self, epoch: int) -> int | None:
        """How many batches this epoch has. None: no rank has reached its end."""
        store, key = self._store(), _key(epoch)
        try:
            if store is not None and store.check([key]):
                return int(store.get(key))
            if store is not None and epoch in self._own:  # the store is a new one
                store.set(key, str(self._own[epoch]))
        except RuntimeError as error:
            log.warning("cannot read from the store whether epoch %d has ended: %s", epoch, error)
        return self._own.get(epoch)

    def write(self, epoch: int, batches: int) -> int:
        """This rank has no more. Returns the end that counts."""
        self._own[epoch] = batches
        store = self._store()
        if store is None:
            return batches
        return int(store.compare_set(_key(epoch), "", str(batches)))


def _key(epoch: int) -> str:
    return f"epoch/{epoch}"
