"""Reads the history from a journal file, which may be damaged, in use, or made to harm its reader.

The file is copied to a private folder first, with its write-ahead log: it may be the only evidence,
and SQLite would change it. A table that is not exactly the one that the journal creates is not
read: a view or a computed column is a program.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from taskd.runtime.clock import monotonic
from taskd.runtime.journal.journal_entries import read_entry
from taskd.runtime.journal.journal_file import CREATE, SCHEMA
from taskd.runtime.journal.journal_values import Entry, JournalUnusable

LOG = "-wal"
MOST_BYTES = 4 << 30
MOST_VALUE_BYTES = 64 << 20
MOST_READING_S = 60.0
STEPS = 100_000
"""How often SQLite looks at the time, in steps of its machine."""
ENTRIES = (
    "SELECT number, incident, at, event, before, after, because, commands FROM entries NOT INDEXED"
    " WHERE job = ?1 AND (?2 = 0 OR incident = ?2)"
)


def read_history(path: Path, job: str, incident: int = 0) -> tuple[list[Entry], str]:
    """The entries, oldest first, and what is wrong if only a part of them could be read.

    Raises JournalUnusable if nothing can be read.
    """
    with TemporaryDirectory(prefix="taskd-journal-") as folder:
        copied, problem = _copied(path, Path(folder))
        found: list[Entry] = []
        try:
            with _opened(copied, "mode=rw") as connection:
                found = [
                    read_entry(job, row) for row in connection.execute(ENTRIES, (job, incident))
                ]
        except (sqlite3.Error, OverflowError) as error:
            found = salvage(copied, job, incident)
            problem = f"the journal {path} cannot be used: {error}"
            if not found:
                raise JournalUnusable(problem) from error
            problem += f"; shown is what could still be read: {len(found)} decisions"
    return sorted(found, key=lambda entry: entry.number), problem


def salvage(path: Path, job: str, incident: int = 0) -> list[Entry]:
    """What can still be read of a damaged journal, up to the damage. Changes nothing in it."""
    found: list[Entry] = []
    with (
        suppress(sqlite3.Error, ValueError, TypeError, OverflowError, JournalUnusable),
        _opened(path, "mode=ro&immutable=1") as connection,
    ):
        for row in connection.execute(ENTRIES, (job, incident)):
            found.append(read_entry(job, row))
    return found


def _copied(path: Path, folder: Path) -> tuple[Path, str]:
    """The path of the copy, and a problem with it."""
    target = folder / "journal"
    for _ in range(3):
        before = _marks(path)
        for source, name in ((path, target), (_log_of(path), _log_of(target))):
            with suppress(FileNotFoundError):
                shutil.copyfile(source, name)
        if _marks(path) == before:
            return target, ""
    return target, f"the journal {path} is being written: the newest decisions may be missing"


def _log_of(path: Path) -> Path:
    return path.with_name(path.name + LOG)


def _marks(path: Path) -> list[tuple[int, int, int]]:
    """Of both files. Raises JournalUnusable unless they are regular files of a possible size."""
    marks = []
    for one in (path, _log_of(path)):
        try:
            found = os.stat(one)
        except FileNotFoundError:
            if one == path:
                raise JournalUnusable(f"the journal {path} does not exist") from None
            continue
        except OSError as error:
            text = f"the journal {path} cannot be opened: {error.strerror}"
            raise JournalUnusable(text) from error
        if stat.S_ISDIR(found.st_mode):
            text = f"{one} is a directory; give the path of a file in it"
            raise JournalUnusable(text)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise JournalUnusable(f"{one} is not a journal: it is not a file, or larger than 4 GiB")
        marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
    return marks


@contextmanager
def _opened(path: Path, how: str) -> Iterator[sqlite3.Connection]:
    began = monotonic()
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as connection:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)
        connection.set_progress_handler(lambda: monotonic() - began > MOST_READING_S, STEPS)
        connection.execute("PRAGMA trusted_schema = OFF")
        if "immutable" in how:
            # Without it, SQLite refuses a file that is shorter than its header says.
            connection.execute("PRAGMA writable_schema = ON")
        else:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA:
                text = f"the journal has version {version}; this program reads version {SCHEMA}"
                raise JournalUnusable(text)
        if _entries_of(connection) != _EXPECTED:
            raise JournalUnusable("the journal has another table of entries than this program's")
        yield connection


def _entries_of(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    found = connection.execute("SELECT type, sql FROM sqlite_master WHERE name = 'entries'")
    return list(found)


def _expected() -> list[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(CREATE)
        return _entries_of(connection)


_EXPECTED = _expected()
