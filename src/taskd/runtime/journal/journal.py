"""clusterd's journal: what was decided for each job, on disk before it takes effect.

Table `jobs` holds the newest record of every job and `notes` what seldom changes: a restart needs
no more. `entries` holds the history that `taskd replay` shows. All change in one transaction, so a
record and its history cannot disagree, and deleting old entries is the only compaction.

One thread writes. All requests that arrive while it is busy go into its next transaction: many jobs
share one fsync. What a record means is defined in `clusterd/records/journal_records.py`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from taskd.errors import Permanent
from taskd.runtime.journal import journal_entries as entries
from taskd.runtime.journal import journal_rows as rows
from taskd.runtime.journal.journal_file import connect, create, reason_of
from taskd.runtime.journal.journal_values import (
    Entry,
    JournalConfig,
    JournalFailed,
    JournalUnusable,
    Write,
)

log = logging.getLogger(__name__)

CHECKPOINT_BYTES = 4 * 1024 * 1024
"""At about this size the write-ahead log is copied into the database, between transactions."""
CANNOT_WRITE = (sqlite3.Error, Permanent, OSError, ValueError, TypeError, OverflowError)
TRANSACTION_BYTES = 16 * 1024
"""What one transaction adds to the log besides long records: a page in each of four B-trees."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Request:
    task: Callable[[sqlite3.Connection], object]
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Journal:
    """Opened by the constructor, which raises at once when the file cannot be used."""

    def __init__(self, path: Path | None, config: JournalConfig | None = None) -> None:
        """Without a path the journal is in memory and ends with the process."""
        self._path, self._config = path, config or JournalConfig()
        self._inbox: SimpleQueue[_Request | None] = SimpleQueue()
        self._closing = False
        self._connection: sqlite3.Connection | None = connect(path)
        self._kept: dict[str, tuple[int, int]] = {}
        """How many entries of each job there are, and how long they are together."""
        self._file: tuple[int, int] | None = None
        """Device and inode of the file, once it was used."""
        self.last_error: str | None = None
        self._log_bytes = 0
        self.transactions = 0
        """Since the start. Fewer than writes, because jobs share them."""
        self._thread = threading.Thread(target=self._work, name="taskd-journal", daemon=True)
        self._thread.start()

    async def append(self, write: Write) -> None:
        """Return when the write would survive a crash of the machine."""
        await self._ask(partial(self._write, write))

    async def add_entry(self, entry: Entry) -> None:
        """Add an entry to a job's history without a new record."""
        await self._ask(partial(self._add, entry))

    async def records(self) -> dict[str, str]:
        """The newest record of every job that has not ended."""

        def read(connection: sqlite3.Connection) -> dict[str, str]:
            return {job: text for job, text, ended, _ in rows.read_jobs(connection) if not ended}

        return await self._ask(read)

    async def notes(self) -> dict[str, str]:
        def read(connection: sqlite3.Connection) -> dict[str, str]:
            return dict(rows.read_notes(connection))

        return await self._ask(read)

    async def note(self, name: str, text: str | None) -> None:
        """Write one note by itself; None removes it."""
        await self._ask(lambda connection: _note(connection, name, text))

    async def newest(self) -> float:
        """The time of the last write; 0: nothing was written."""

        def read(connection: sqlite3.Connection) -> float:
            return max((changed for _, _, _, changed in rows.read_jobs(connection)), default=0.0)

        return await self._ask(read)

    async def record(self, job: str) -> str | None:
        """The newest record of one job, also when it has ended."""

        def read(connection: sqlite3.Connection) -> str | None:
            row = connection.execute(
                "SELECT record, ended, changed FROM jobs WHERE job = ?", (job,)
            ).fetchone()
            return rows.without_sum(row[0], job, row[1], row[2]) if row else None

        return await self._ask(read)

    async def history(
        self, job: str, incident: int = 0, after: int = 0, *, most_bytes: int | None = None
    ) -> list[Entry]:
        """The history of a job, oldest first; of one incident, or of all (0); after a number.

        With `most_bytes` the first part of it, and at least one entry if there is one.
        """
        return await self._ask(partial(entries.read_history_of, job, incident, after, most_bytes))

    async def aclose(self) -> None:
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write all requests that are queued, then close the file."""
        if not self._closing:
            self._closing = True
            self._inbox.put(None)
        self._thread.join()

    async def _ask(self, task: Callable[[sqlite3.Connection], T]) -> T:
        return await self._queue(task)

    def _queue(self, task: Callable[[sqlite3.Connection], T]) -> asyncio.Future[T]:
        """Tasks are carried out in the order of these calls."""
        if self._closing:
            raise JournalFailed("the journal is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        self._inbox.put(_Request(task, answer, loop))
        return answer

    # In the journal's own thread

    def _work(self) -> None:
        while batch := self._batch():
            try:
                results = self._transact([request.task for request in batch])
            # A value that SQLite cannot store, such as a lone surrogate, must not end this thread.
            except CANNOT_WRITE as error:
                self._fail(batch, error)
                continue
            self.last_error = None
            _deliver(list(zip(batch, results, strict=True)))
            self._checkpoint()
        self._disconnect()

    def _batch(self) -> list[_Request]:
        """All requests that are queued now, at least one; empty at the end."""
        request = self._inbox.get()
        batch = []
        while request is not None:
            batch.append(request)
            try:
                request = self._inbox.get_nowait()
            except Empty:
                return batch
        if batch:
            self._inbox.put(None)
        return batch

    def _transact(self, tasks: list[Callable[[sqlite3.Connection], object]]) -> list[object]:
        if self._connection is None:
            self._connection = self._connected_again()
        self._connection = self._still_there(self._connection)
        self._connection.execute("BEGIN")
        results = [task(self._connection) for task in tasks]
        self._connection.execute("COMMIT")
        self.transactions += 1
        self._log_bytes += TRANSACTION_BYTES
        return results

    def _connected_again(self) -> sqlite3.Connection:
        """After a failure. What was in a file that has been deleted since cannot be restored."""
        if self._path is not None and not self._path.exists():
            log.error(
                "journal %s was deleted after it could not be written: a new one begins", self._path
            )
            self._file = None
        return connect(self._path)

    def _still_there(self, connection: sqlite3.Connection) -> sqlite3.Connection:
        """Write the file again if it was deleted: SQLite would go on writing to nothing.

        Raises JournalUnusable if another file is in its place, which is not ours to overwrite.
        """
        if self._path is None:
            return connection
        try:
            found = self._path.stat()
        except FileNotFoundError:
            log.error("journal %s was deleted while in use: it is written again", self._path)
            return self._write_again(connection, self._path)
        if self._file not in (None, (found.st_dev, found.st_ino)):
            raise JournalUnusable(
                f"another file has taken the place of the journal {self._path}: move it away"
            )
        self._file = (found.st_dev, found.st_ino)
        return connection

    def _write_again(self, connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
        copy = path.with_name(f"{path.name}.again")
        copy.unlink(missing_ok=True)
        create(copy)
        connection.execute("VACUUM INTO ?", (str(copy),))
        for left in ("-wal", "-shm"):  # of the deleted file: they do not fit the copy
            path.with_name(path.name + left).unlink(missing_ok=True)
        copy.rename(path)
        self._file = None
        connection.close()  # not before: until now only it had what was written
        return connect(path)

    def _fail(self, batch: list[_Request], error: Exception) -> None:
        """Abort the transaction; the next one uses a new connection."""
        self._disconnect()
        self._kept.clear()
        where, reason = self._path or "in memory", reason_of(error, self._path)
        self.last_error = f"the journal {where} cannot be written: {reason}"
        log.error("%s; the last written state stays in effect", self.last_error)
        _deliver([(request, JournalFailed(self.last_error)) for request in batch])

    def _has_its_file(self) -> bool:
        """Otherwise only our connection still has what was written."""
        if self._path is None or self._file is None:
            return self._path is not None
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return self._file == (found.st_dev, found.st_ino)

    def _disconnect(self) -> None:
        if self._connection is not None and (self._closing or self._has_its_file()):
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        elif self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _write(self, write: Write, connection: sqlite3.Connection) -> None:
        connection.execute(
            "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)",
            (
                write.job,
                rows.with_sum(write.record, write.job, int(write.ended), float(write.at)),
                write.ended,
                float(write.at),
            ),
        )
        connection.executemany(entries.INSERT, [entries.row_of(entry) for entry in write.entries])
        for name, text in write.notes:
            _note(connection, name, text)
            self._log_bytes += len(text or "")
        self._log_bytes += len(write.record)
        self._cut(write.job, write.entries, connection)
        if write.ended:
            self._cut_ended(write.job, connection)

    def _add(self, entry: Entry, connection: sqlite3.Connection) -> None:
        connection.execute(entries.INSERT, entries.row_of(entry))
        self._cut(entry.job, (entry,), connection)

    def _cut(self, job: str, added: Sequence[Entry], connection: sqlite3.Connection) -> None:
        """Delete the oldest entries of a job, once there is a quarter too much of them."""
        written = sum(map(entries.length_of, added))
        self._log_bytes += written
        if job in self._kept:
            kept, length = self._kept[job]
            kept, length = kept + len(added), length + written
        else:
            sums = f"SELECT COUNT(*), COALESCE(SUM({entries.LENGTH}), 0) FROM entries WHERE job = ?"
            kept, length = map(int, connection.execute(sums, (job,)).fetchone())
        most, longest = self._config.entries_per_job, self._config.bytes_per_job
        if kept > most + max(most // 4, 1) or length > longest + longest // 4:
            kept, length = self._delete_oldest(job, connection)
        self._kept[job] = kept, length

    def _delete_oldest(self, job: str, connection: sqlite3.Connection) -> tuple[int, int]:
        """How many are left, and how long they are. The newest one stays, however long it is."""
        kept = length = 0
        rows = f"SELECT number, {entries.LENGTH} FROM entries WHERE job = ? ORDER BY number DESC"
        for number, size in connection.execute(rows, (job,)).fetchall():
            is_too_long = kept and length + size > self._config.bytes_per_job
            if is_too_long or kept == self._config.entries_per_job:
                old = "DELETE FROM entries WHERE job = ? AND number <= ?"
                connection.execute(old, (job, number))
                break
            kept, length = kept + 1, length + int(size)
        return kept, length

    def _cut_ended(self, job: str, connection: sqlite3.Connection) -> None:
        """Delete the oldest ended jobs."""
        self._kept.pop(job)
        over = connection.execute(
            "SELECT job FROM jobs WHERE ended ORDER BY changed DESC LIMIT -1 OFFSET ?",
            (self._config.ended_jobs,),
        ).fetchall()
        for (oldest,) in over:
            connection.execute("DELETE FROM jobs WHERE job = ?", (oldest,))
            connection.execute("DELETE FROM entries WHERE job = ?", (oldest,))

    def _checkpoint(self) -> None:
        """After the requests of this batch are answered, so that none of them waits for it."""
        if self._path is None or self._connection is None or self._log_bytes < CHECKPOINT_BYTES:
            return
        self._log_bytes = 0
        # The log file keeps its size and is overwritten from its start: that makes fsync cheaper
        # than a growing file.
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(RESTART)")


def _deliver(results: list[tuple[_Request, object]]) -> None:
    """One wake-up per waiting loop, however many of its tasks wait."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Request, object]]] = {}
    for request, result in results:
        by_loop.setdefault(request.loop, []).append((request, result))
    for loop, answers in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and nothing waits any more
            loop.call_soon_threadsafe(_answer, answers)


def _answer(results: list[tuple[_Request, object]]) -> None:
    for request, result in results:
        if request.answer.done():
            continue
        if isinstance(result, JournalFailed):
            request.answer.set_exception(result)
        else:
            request.answer.set_result(result)


def _note(connection: sqlite3.Connection, name: str, text: str | None) -> None:
    if text is None:
        connection.execute("DELETE FROM notes WHERE name = ?", (name,))
    else:
        stored = rows.with_sum(text, name)
        connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, stored))
