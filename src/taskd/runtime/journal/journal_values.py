"""What clusterd's journal holds, and how it fails."""

from __future__ import annotations

from dataclasses import dataclass

from taskd.errors import Permanent, Transient


class JournalFailed(Transient):
    """Nothing was written and nothing has changed: the disk is full, read-only or broken."""


class JournalUnusable(Permanent):
    """The file is not a journal, is of a newer version, or is used by another server."""


@dataclass(frozen=True, slots=True)
class JournalConfig:
    entries_per_job: int = 2_000
    """How many entries of history are kept per job; the oldest are deleted first."""

    bytes_per_job: int = 8 << 20
    """How many characters all of them have: a job may report long incidents."""

    ended_jobs: int = 1_000
    """How many ended jobs are kept."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a job's history."""

    job: str
    incident: int
    at: float
    event: str
    before: str
    after: str
    because: str
    commands: tuple[str, ...] = ()
    number: int = 0
    """Assigned by the journal."""


@dataclass(frozen=True, slots=True)
class Write:
    """A job's new record and the history that led to it, written atomically."""

    job: str
    record: str
    at: float
    entries: tuple[Entry, ...] = ()
    ended: bool = False
    notes: tuple[tuple[str, str | None], ...] = ()
    """What is large and changes seldom, kept out of the record; None removes a note."""
