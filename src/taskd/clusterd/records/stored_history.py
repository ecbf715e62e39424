"""The history of a job where its state is kept, so that it outlives the leader who made it.

The newest entries are part of the job's record: they cannot disagree with it, and cost no write of
their own. When they become long they are moved to a record of their own, a page, which never
changes again. Of the pages, the newest `MOST_PAGES` are kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from taskd.runtime.journal.journal_values import Entry
from taskd.wire.json_reading import loads

PAGE_CHARS = 32_000
"""Compressed these are 2 to 4 KB, which every decision adds to its write."""
MOST_PAGES = 16


@dataclass(frozen=True, slots=True)
class StoredHistory:
    open: tuple[str, ...] = ()
    """The entries since the newest page, as JSON."""
    first: int = 0
    """The number of the oldest page that is kept."""
    next: int = 0
    """The number of the next page."""

    def with_entries(self, entries: Iterable[Entry]) -> StoredHistory:
        return StoredHistory((*self.open, *map(_text, entries)), self.first, self.next)

    @property
    def full(self) -> bool:
        return sum(map(len, self.open)) > PAGE_CHARS

    def turned(self) -> StoredHistory:
        """The open entries are in page `next` now."""
        return StoredHistory((), max(self.first, self.next + 1 - MOST_PAGES), self.next + 1)

    def to_json(self) -> dict[str, object]:
        return {"open": self.open, "first": self.first, "next": self.next}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> StoredHistory:
        """Raises KeyError, TypeError or ValueError if it was not written by `to_json`."""
        return cls(tuple(map(str, body["open"])), int(body["first"]), int(body["next"]))


@dataclass(frozen=True, slots=True)
class Page:
    job: str
    number: int
    entries: tuple[str, ...]

    @property
    def name(self) -> str:
        return page_name(self.job, self.number)

    def to_json(self) -> str:
        return json.dumps({"history_of": self.job, "page": self.number, "entries": self.entries})


def page_name(job: str, number: int) -> str:
    """Of the record. No job has this name: ids of jobs have no line breaks."""
    return f"{job}\nhistory {number}"


def read_page(text: str) -> Page | None:
    """None: it is not a page."""
    try:
        body = loads(text)
        return Page(str(body["history_of"]), int(body["page"]), tuple(map(str, body["entries"])))
    except (KeyError, TypeError, ValueError):
        return None


def read_entries(job: str, texts: Iterable[str]) -> tuple[Entry, ...]:
    return tuple(entry for text in texts if (entry := _entry(job, text)) is not None)


def _text(entry: Entry) -> str:
    words = (entry.event, entry.before, entry.after, entry.because, entry.commands)
    return json.dumps((entry.incident, entry.at, *words))


def _entry(job: str, text: str) -> Entry | None:
    try:
        incident, at, event, before, after, because, commands = loads(text)
        words = (str(event), str(before), str(after), str(because), tuple(map(str, commands)))
        return Entry(job, int(incident), float(at), *words)
    except (TypeError, ValueError):
        return None
