"""Rows of the journal with a checksum: a row that was damaged or edited is put aside, not used.

The checksum covers the whole row and comes before its text, as eight hexadecimal digits and a
space. What is put aside stays in the table `damaged`, for people.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
from collections.abc import Iterator
from typing import Any
from zlib import crc32

log = logging.getLogger(__name__)

_SUMMED = re.compile(r"([0-9a-f]{8}) (.*)", re.DOTALL)
DAMAGED = (
    "CREATE TABLE IF NOT EXISTS damaged (place TEXT NOT NULL, name TEXT NOT NULL, content TEXT)"
)


def with_sum(text: str, *row: object) -> str:
    """The text as it is stored; `row` are the other values of its row."""
    return f"{_sum(text, row)} {text}"


def without_sum(stored: object, *row: object) -> str | None:
    """The text; None: the row is damaged."""
    if not isinstance(stored, str):
        return None
    found = _SUMMED.fullmatch(stored)
    return found[2] if found is not None and found[1] == _sum(found[2], row) else None


def _sum(text: str, row: tuple[object, ...]) -> str:
    covered = json.dumps([text, *row], default=repr).encode()
    return f"{crc32(covered):08x}"


def read_jobs(connection: sqlite3.Connection) -> Iterator[tuple[str, str, bool, float]]:
    """Job, record, whether it has ended, and the time, of every row that is not damaged."""
    rows = connection.execute("SELECT job, record, ended, changed FROM jobs").fetchall()
    for job, record, ended, changed in rows:
        text = None
        if isinstance(job, str) and ended in (0, 1) and isinstance(changed, float | int):
            text = without_sum(record, job, int(ended), float(changed))
        if text is None:
            put_aside(connection, "jobs", "job", job, record)
        else:
            yield job, text, bool(ended), float(changed)


def read_notes(connection: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    for name, stored in connection.execute("SELECT name, text FROM notes").fetchall():
        text = without_sum(stored, name) if isinstance(name, str) else None
        if text is None:
            put_aside(connection, "notes", "name", name, stored)
        else:
            yield name, text


def put_aside(
    connection: sqlite3.Connection, table: str, column: str, name: Any, content: Any
) -> None:
    """Move a row to `damaged`, so that the next start does not meet it again."""
    log.error(
        "journal: row %r of %s is damaged and is not used; it is kept in the table `damaged`",
        name,
        table,
    )
    connection.execute(DAMAGED)
    connection.execute("INSERT INTO damaged VALUES (?, ?, ?)", (table, str(name), repr(content)))
    connection.execute(f"DELETE FROM {table} WHERE {column} IS ?", (name,))
