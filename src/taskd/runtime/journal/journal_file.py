"""Opens the journal's file, for one server only, and says why one cannot be used."""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from errno import EISDIR
from pathlib import Path
from tempfile import TemporaryFile

from taskd.runtime.journal.journal_values import JournalUnusable

SCHEMA = 2
CREATE = """
CREATE TABLE jobs (
    job TEXT PRIMARY KEY, record TEXT NOT NULL, ended INTEGER NOT NULL, changed REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE entries (
    number INTEGER PRIMARY KEY, job TEXT NOT NULL, incident INTEGER NOT NULL, at REAL NOT NULL,
    event TEXT NOT NULL, before TEXT NOT NULL, after TEXT NOT NULL, because TEXT NOT NULL,
    commands TEXT NOT NULL
);
CREATE INDEX entries_of_job ON entries (job, number);
"""


def connect(path: Path | None) -> sqlite3.Connection:
    where = ":memory:" if path is None else str(path)
    try:
        if path is not None:
            create(path)
        connection = sqlite3.connect(
            where, timeout=2.0, isolation_level=None, check_same_thread=False
        )
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise JournalUnusable(f"the journal {where} cannot be opened: {reason}") from error
    try:
        # Exclusive: a second server on the same file would make its own decisions.
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            connection.executescript(f"BEGIN; {CREATE} PRAGMA user_version = {SCHEMA}; COMMIT;")
        elif version != SCHEMA:
            raise JournalUnusable(
                f"the journal {where} has version {version}; this program reads version {SCHEMA}"
            )
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise JournalUnusable(
            f"the journal {where} cannot be used: {reason_of(error, path)}"
        ) from error
    except JournalUnusable:
        connection.close()
        raise
    return connection


def create(path: Path) -> None:
    """Readable by this user only: SQLite would create a file that all users can read."""
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "it is a directory; give the path of a file in it")
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def reason_of(error: Exception, path: Path | None) -> str:
    """SQLite reports every failure as a disk I/O error; a write next to it shows the reason."""
    if path is not None and isinstance(error, sqlite3.OperationalError):
        try:
            with TemporaryFile(dir=path.parent, buffering=0) as probe:
                probe.write(b"?")
        except OSError as reason:
            return f"{error} ({reason.strerror})"
    return str(error)
