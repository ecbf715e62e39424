"""Continuous checkpoints: at which steps, and which ranks write which part.

Every rank decides this by itself, from what all of them know; no state is written twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank


@dataclass(frozen=True, slots=True)
class Parts:
    """What one checkpoint consists of."""

    writers: tuple[Rank, ...]
    """The ranks that write anything."""
    shards: frozenset[Rank]
    """Those that write the state of their class: one for each."""
    own: bool
    """Each rank writes what only it has."""

    @property
    def first(self) -> Rank:
        """The rank that also writes what all ranks hold alike."""
        return min(self.shards)


def is_due(agreement: Agreement, step: int, every: int) -> bool:
    """Whether the state of this step is written. The same on all ranks."""
    return every > 0 and step % every == 0 and step > agreement.start


def parts(agreement: Agreement, step: int, members: Collection[int]) -> Parts | None:
    """None: with the ranks that are in the job now, the checkpoint would not be complete."""
    shards = {
        next((rank for rank in ranks if rank in members), None)
        for ranks in agreement.members().values()
    }
    own = 0 <= agreement.own_since <= step
    needs_all = own or agreement.is_divided
    if None in shards or (needs_all and len(members) < len(agreement.shards)):
        return None
    holders = frozenset(rank for rank in shards if rank is not None)
    writers = sorted(agreement.shards) if own else sorted(holders)
    return Parts(tuple(writers), holders, own)
