"""A journal whose records of jobs are in a store that several processes share.

The state of each job is one record, written with compare-and-set before a decision takes effect.
So is the history that `taskd replay` shows (`stored_history.py`): a new leader reads it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from taskd.clusterd.keyed_lock import KeyedLock
from taskd.clusterd.records.stored_history import (
    Page,
    StoredHistory,
    page_name,
    read_entries,
    read_page,
)
from taskd.core.record import Lease, Record, RecordConflict, RecordStore, Stored, StoreUnreachable
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import Entry, JournalConfig, JournalFailed, Write
from taskd.wire.json_reading import loads

log = logging.getLogger(__name__)

AT_ONCE = 16
"""How many records a new leader claims at the same time."""


@dataclass(frozen=True, slots=True)
class JobState:
    record: str = ""
    """Empty: the job was declared, and no client has registered it yet."""
    notes: dict[str, str] = field(default_factory=dict)
    at: float = 0.0
    history: StoredHistory = field(default_factory=StoredHistory)

    def to_json(self) -> str:
        body = {"record": self.record, "notes": self.notes, "at": self.at}
        return json.dumps({**body, "history": self.history.to_json()})

    @classmethod
    def from_json(cls, text: str) -> JobState:
        """Raises ValueError if it was not written by `to_json`."""
        try:
            body: dict[str, Any] = loads(text)
            notes = {str(name): str(note) for name, note in body["notes"].items()}
            history = StoredHistory.from_json(body["history"])
            return cls(str(body["record"]), notes, float(body["at"]), history)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a state of a job: {error!r}") from error


@dataclass(frozen=True, slots=True)
class _Held:
    state: JobState
    stored: Stored


class RecordJournal(Journal):
    def __init__(
        self,
        store: RecordStore,
        lease: Lease,
        epoch: int,
        lost: Callable[[], None],
        config: JournalConfig | None = None,
        begin_above: Callable[[int], Awaitable[int | None]] | None = None,
    ) -> None:
        """`lost` is called when another leader has claimed a record of ours; `begin_above` begins
        a term with a higher epoch than that, or returns None if another process was faster."""
        super().__init__(None, config)
        self._begin_above = begin_above
        self._store, self._lease, self._epoch, self._lost = store, lease, epoch, lost
        self._held: dict[str, _Held] = {}
        self._writing: KeyedLock[str] = KeyedLock()

    async def claim(self) -> None:
        """Read all records and write our epoch into each: no earlier leader can write any more.

        Records of a later epoch are those of a later leader, or the lease was deleted, and its
        count began again: if we can, we begin a term above them all. Raises StoreUnreachable, or
        RecordConflict if a later leader exists.
        """
        limit = asyncio.Semaphore(AT_ONCE)

        async def claim(name: str, stored: Stored) -> None:
            async with limit:
                await self._claim(name, stored)

        found = await self._store.read_all()
        newest = max((stored.record.epoch for stored in found.values()), default=0)
        if newest > self._epoch:
            self._epoch = await self._term_above(newest)
        read = {name: read_page(stored.record.state) for name, stored in found.items()}
        pages = {name: page for name, page in read.items() if page is not None}
        jobs = {name: stored for name, stored in found.items() if name not in pages}
        await asyncio.gather(*(claim(name, stored) for name, stored in jobs.items()))
        for job, held in self._held.items():
            await self._restore_history(job, held.state, pages)

    async def _term_above(self, epoch: int) -> int:
        while self._begin_above is not None and self._lease.held:
            ours = await self._begin_above(epoch)
            if ours is not None:
                log.warning("the lease had lost its count: epoch=%d, records up to %d", ours, epoch)
                return ours
        raise RecordConflict(f"the records belong to the leader of epoch {epoch}")

    async def _restore_history(self, job: str, state: JobState, pages: dict[str, Page]) -> None:
        kept = range(state.history.first, state.history.next)
        names = (page_name(job, number) for number in kept)
        texts = [text for name in names if name in pages for text in pages[name].entries]
        entries = read_entries(job, (*texts, *state.history.open))
        if entries:
            await super().append(Write(job, state.record, state.at, entries))

    async def _claim(self, name: str, stored: Stored | None) -> None:
        while stored is not None:
            try:
                state = JobState.from_json(stored.record.state)
            except ValueError as error:
                log.error("job=%s cannot be restored and must register again: %s", name, error)
                return
            mine = stored.record.followed_by(stored.record.state, self._epoch)
            try:
                claimed = await self._store.write(name, mine, stored.version)
            except RecordConflict:  # the former leader was faster once more
                stored = await self._store.read(name)
                continue
            self._held[name] = _Held(state, claimed)
            return

    async def append(self, write: Write) -> None:
        async with self._writing.hold(write.job):
            if write.ended:
                await self._remove(write.job)
            else:
                state = self._state(write.job)
                notes = dict(state.notes)
                for name, text in write.notes:
                    _set(notes, name, text)
                history = await self._with_entries(write.job, write.entries)
                await self._store_state(write.job, JobState(write.record, notes, write.at, history))
        self._remember(partial(self._write, replace(write, notes=())))

    async def add_entry(self, entry: Entry) -> None:
        async with self._writing.hold(entry.job):
            if entry.job in self._held:
                history = await self._with_entries(entry.job, (entry,))
                state = replace(self._state(entry.job), history=history)
                await self._store_state(entry.job, state)
        self._remember(partial(self._add, entry))

    def _remember(self, task: Callable[[sqlite3.Connection], None]) -> None:
        """For later readers of the history in this process: the decision does not wait for it."""

        def done(answer: asyncio.Future[None]) -> None:
            if not answer.cancelled() and (error := answer.exception()):
                log.warning("the history of this process is not complete: %s", error)

        self._queue(task).add_done_callback(done)

    async def _with_entries(self, job: str, entries: tuple[Entry, ...]) -> StoredHistory:
        """The job's history with these entries; a full page is written to a record of its own."""
        history = self._state(job).history
        if history.full:
            page = Page(job, history.next, history.open)
            turned = history.turned()
            try:
                await self._set(page.name, page.to_json(), None)
                for number in range(history.first, turned.first):
                    await self._remove_page(page_name(job, number))
            except (RecordConflict, StoreUnreachable) as error:
                raise self._failed(error) from error
            history = turned
        return history.with_entries(entries)

    async def _remove_page(self, name: str) -> None:
        stored = await self._store.read(name)
        if stored is not None:
            self._check_lease()
            await self._store.remove(name, stored.version)

    async def note(self, name: str, text: str | None) -> None:
        job = name.partition("/")[2]
        async with self._writing.hold(job):
            state = self._state(job)
            notes = dict(state.notes)
            _set(notes, name, text)
            if notes or state.record:
                await self._store_state(job, replace(state, notes=notes))
            else:
                await self._remove(job)

    async def records(self) -> dict[str, str]:
        return {job: held.state.record for job, held in self._held.items() if held.state.record}

    async def notes(self) -> dict[str, str]:
        return {
            name: text for held in self._held.values() for name, text in held.state.notes.items()
        }

    async def newest(self) -> float:
        return max((held.state.at for held in self._held.values()), default=0.0)

    async def _store_state(self, job: str, state: JobState) -> None:
        text = state.to_json()
        held = self._held.get(job)
        try:
            stored = await self._set(job, text, held.stored if held else None)
        except (RecordConflict, StoreUnreachable) as error:
            raise self._failed(error) from error
        self._held[job] = _Held(state, stored)

    async def _set(self, job: str, text: str, before: Stored | None) -> Stored:
        self._check_lease()
        try:
            return await self._store.write(job, _next(before, text, self._epoch), _version(before))
        except RecordConflict:
            # Either a write of ours whose answer was lost, or one of another leader. What is
            # stored tells which: `_next` refuses to follow a record of a later epoch.
            before = await self._store.read(job)
            self._check_lease()
            return await self._store.write(job, _next(before, text, self._epoch), _version(before))

    async def _remove(self, job: str) -> None:
        held = self._held.get(job)
        if held is None:
            return
        kept = range(held.state.history.first, held.state.history.next)
        try:
            self._check_lease()
            for number in kept:
                await self._remove_page(page_name(job, number))
            try:
                await self._store.remove(job, held.stored.version)
            except RecordConflict:
                stored = await self._store.read(job)
                if stored is not None:
                    stored.record.followed_by("", self._epoch)
                    await self._store.remove(job, stored.version)
        except (RecordConflict, StoreUnreachable) as error:
            raise self._failed(error) from error
        del self._held[job]

    def _state(self, job: str) -> JobState:
        held = self._held.get(job)
        return held.state if held else JobState()

    def _check_lease(self) -> None:
        if not self._lease.held:
            raise StoreUnreachable("this process does not lead any more")

    def _failed(self, error: Exception) -> JournalFailed:
        if isinstance(error, RecordConflict):
            self._lost()
        self.last_error = str(error)
        log.error("%s; the last written state stays in effect", error)
        return JournalFailed(str(error))


def _set(notes: dict[str, str], name: str, text: str | None) -> None:
    if text is None:
        notes.pop(name, None)
    else:
        notes[name] = text


def _next(before: Stored | None, text: str, epoch: int) -> Record:
    return before.record.followed_by(text, epoch) if before else Record(epoch, 1, text)


def _version(before: Stored | None) -> str | None:
    return before.version if before else None
