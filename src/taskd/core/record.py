"""State that outlives its process: one record per job, written by one leader at a time.

The leader of a term has an epoch, and every later leader a higher one. It claims each record by
writing its own epoch into it. A write names the version that it replaces, so a process that still
believes to lead cannot overwrite what its successor has claimed: it gets a `RecordConflict`.

Stores are at the edge: ConfigMaps and a Lease of Kubernetes are in `clusterd/kubernetes/`,
keys of etcd in `clusterd/etcd/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from taskd.errors import Permanent, Transient


class RecordConflict(Permanent):
    """Another process has written the record since it was read. Nothing was written."""


class StoreUnreachable(Transient):
    """The store did not answer: the write may or may not have happened."""


@dataclass(frozen=True, slots=True)
class Record:
    epoch: int
    """The term of the leader that wrote it."""
    sequence: int
    """Grows by one with every write of any leader."""
    state: str

    def followed_by(self, state: str, epoch: int) -> Record:
        """Raises RecordConflict if a later leader has claimed the record."""
        if self.epoch > epoch:
            raise RecordConflict(f"the record belongs to the leader of epoch {self.epoch}")
        return Record(epoch, self.sequence + 1, state)


@dataclass(frozen=True, slots=True)
class Stored:
    record: Record
    version: str
    """The store's own name for this version, without further meaning."""


class RecordStore(Protocol):
    """Every method may raise StoreUnreachable."""

    async def read(self, name: str) -> Stored | None: ...

    async def read_all(self) -> dict[str, Stored]: ...

    async def write(self, name: str, record: Record, version: str | None) -> Stored:
        """Compare and set. Without a version the record must not exist yet.

        Raises RecordConflict if the stored version is another one.
        """
        ...

    async def remove(self, name: str, version: str) -> None:
        """Raises RecordConflict if the stored version is another one."""
        ...


class Lease(Protocol):
    """The right to lead, for a limited time. Every method may raise StoreUnreachable."""

    async def acquire(self) -> int | None:
        """One try: the epoch of our term, or None while another process holds the lease."""
        ...

    async def renew(self) -> bool:
        """False: another process has taken the lease. This process must stop to decide."""
        ...

    async def release(self) -> None:
        """Let another process take over at once."""
        ...

    @property
    def held(self) -> bool:
        """Whether the last renewal is recent enough to decide. Ask before every write."""
        ...
