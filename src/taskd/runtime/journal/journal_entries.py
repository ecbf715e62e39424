"""The entries of a job's history, as rows of the table `entries`."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

from taskd.runtime.journal import journal_rows as rows
from taskd.runtime.journal.journal_values import Entry
from taskd.wire.json_reading import loads

MOST_INCIDENT, MOST_TIME = 1 << 53, 253_402_300_800.0
"""What an entry can have: larger numbers are not exact in JSON, later times not shown."""
INSERT = (
    "INSERT INTO entries (job, incident, at, event, before, after, because, commands)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
LENGTH = "LENGTH(event) + LENGTH(because) + LENGTH(commands)"
"""Of an entry: what may be long."""


def row_of(entry: Entry) -> tuple[object, ...]:
    row = (
        entry.job,
        entry.incident,
        float(entry.at),
        _encodable(entry.event),
        entry.before,
        entry.after,
        _encodable(entry.because),
    )
    return (*row, rows.with_sum(json.dumps(entry.commands), *row))


def _encodable(text: str) -> str:
    """Reasons may quote names of files and objects, which need not be valid Unicode."""
    return text.encode(errors="replace").decode()


def read_history_of(
    job: str, incident: int, after: int, most_bytes: int | None, connection: sqlite3.Connection
) -> list[Entry]:
    found = connection.execute(
        "SELECT number, incident, at, event, before, after, because, commands FROM entries"
        " WHERE job = ?1 AND (?2 = 0 OR incident = ?2) AND number > ?3 ORDER BY number",
        (job, incident, after),
    )
    entries, length = list[Entry](), 0
    for row in found:
        entries.append(read_entry(job, row))
        length += length_of(entries[-1])
        if most_bytes is not None and length >= most_bytes:
            break
    return entries


def length_of(entry: Entry) -> int:
    return len(entry.event) + len(entry.because) + sum(map(len, entry.commands))


def read_entry(job: str, row: Sequence[Any]) -> Entry:
    """From a row of `entries`. The file may come from anywhere: any column can hold anything."""
    number, incident, at, event, before, after, because, stored = row
    commands = rows.without_sum(stored, job, incident, at, event, before, after, because)
    ordered = _texts(commands)
    texts = (event, before, after, because)
    if (
        ordered is None
        or not all(isinstance(text, str) for text in texts)
        or not (isinstance(incident, int) and 0 <= incident < MOST_INCIDENT)
        or not (isinstance(at, float | int) and 0 <= at < MOST_TIME)
    ):
        why = "this entry of the journal is damaged; what it said is not known"
        return Entry(job, 0, 0.0, "DamagedEntry", "", "", why, (), number)
    return Entry(job, incident, at, event, before, after, because, ordered, number)


def _texts(commands: str | None) -> tuple[str, ...] | None:
    """None: they are not a list of texts."""
    try:
        found = loads(commands or "")
    except ValueError:
        return None
    is_right = isinstance(found, list) and all(isinstance(one, str) for one in found)
    return tuple(found) if is_right else None
