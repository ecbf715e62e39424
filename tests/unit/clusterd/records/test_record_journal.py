"""Two leaders and one store: no write of the former one counts once the next has claimed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest

from taskd.clusterd.records.record_journal import RecordJournal
from taskd.clusterd.records.stored_history import MOST_PAGES, PAGE_CHARS
from taskd.core.record import Record, RecordConflict, Stored, StoreUnreachable
from taskd.runtime.journal.journal_values import Entry, JournalFailed, Write


@dataclass
class Store:
    """In memory. `trouble` says what happens to the next writes."""

    stored: dict[str, Stored] = field(default_factory=dict)
    version: int = 0
    trouble: list[str] = field(default_factory=list)

    async def read(self, name: str) -> Stored | None:
        return self.stored.get(name)

    async def read_all(self) -> dict[str, Stored]:
        return dict(self.stored)

    async def write(self, name: str, record: Record, version: str | None) -> Stored:
        trouble = self.trouble.pop(0) if self.trouble else ""
        if trouble == "down":
            raise StoreUnreachable("down")
        found = self.stored.get(name)
        if (found.version if found else None) != version:
            raise RecordConflict("another version")
        self.version += 1
        self.stored[name] = Stored(record, str(self.version))
        if trouble == "answer lost":
            raise StoreUnreachable("timeout")
        return self.stored[name]

    async def remove(self, name: str, version: str) -> None:
        found = self.stored.get(name)
        if found is not None and found.version != version:
            raise RecordConflict("another version")
        self.stored.pop(name, None)


@dataclass
class Held:
    held: bool = True
    later: bool = False
    """Another process has taken it."""

    async def acquire(self, above: int = 0) -> int | None:
        self.held = not self.later
        return None if self.later else above + 1

    async def renew(self) -> bool:
        return True

    async def release(self) -> None: ...


class Leader:
    def __init__(self, store: Store, epoch: int) -> None:
        self.lease, self.lost = Held(), asyncio.Event()
        begin = self.lease.acquire
        self.journal = RecordJournal(store, self.lease, epoch, self.lost.set, None, begin)

    async def write(self, text: str, job: str = "job", **more: object) -> None:
        await self.journal.append(Write(job, text, 1.0, **more))  # type: ignore[arg-type]


def test_next_leader_continues_from_the_records_and_notes_of_the_former() -> None:
    async def main() -> None:
        store = Store()
        old = Leader(store, 1)
        await old.write("first", notes=(("pods/job", "two"),))
        await old.write("second")
        await old.journal.note("declared/other", "declaration")
        new = Leader(store, 2)
        await new.journal.claim()
        assert await new.journal.records() == {"job": "second"}
        assert await new.journal.notes() == {"pods/job": "two", "declared/other": "declaration"}
        assert await new.journal.newest() == 1.0
        assert store.stored["job"].record.epoch == 2
        assert store.stored["job"].record.sequence == 3
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())


def test_leader_whose_lease_lost_its_count_begins_a_term_above_all_records() -> None:
    """The Lease was deleted: the next leader has epoch 1, and finds records of epoch 5."""

    async def main() -> None:
        store = Store()
        old = Leader(store, 5)
        await old.write("first")
        new = Leader(store, 1)
        await new.journal.claim()
        assert await new.journal.records() == {"job": "first"}
        await new.write("second")
        assert store.stored["job"].record.epoch == 6
        with pytest.raises(JournalFailed, match="epoch 6"):
            await old.write("stale")
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())


def test_records_of_a_later_leader_are_not_claimed() -> None:
    async def main() -> None:
        store = Store()
        later = Leader(store, 5)
        await later.write("first")
        late = Leader(store, 4)
        late.lease.later = True
        with pytest.raises(RecordConflict, match="epoch 5"):
            await late.journal.claim()
        assert store.stored["job"].record.epoch == 5
        for leader in (later, late):
            await leader.journal.aclose()

    asyncio.run(main())


def test_former_leader_cannot_write_after_the_next_has_claimed() -> None:
    async def main() -> None:
        store = Store()
        old = Leader(store, 1)
        await old.write("first")
        new = Leader(store, 2)
        await new.journal.claim()
        with pytest.raises(JournalFailed, match="epoch 2"):
            await old.write("stale")
        assert old.lost.is_set()
        await new.write("second")
        assert not new.lost.is_set()
        with pytest.raises(JournalFailed):
            await old.write("end", ended=True)
        assert store.stored["job"].record.epoch == 2
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())


def test_record_that_the_former_leader_made_after_the_claim_is_taken_over() -> None:
    async def main() -> None:
        store = Store()
        old, new = Leader(store, 1), Leader(store, 2)
        await new.journal.claim()
        await old.write("late")
        await new.write("registered")
        assert store.stored["job"].record.epoch == 2
        with pytest.raises(JournalFailed):
            await old.write("stale")
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())


def test_nothing_is_written_without_the_lease() -> None:
    async def main() -> None:
        store = Store()
        leader = Leader(store, 1)
        leader.lease.held = False
        with pytest.raises(JournalFailed, match="does not lead"):
            await leader.write("first")
        assert store.stored == {}
        await leader.journal.aclose()

    asyncio.run(main())


def test_write_whose_answer_was_lost_is_not_taken_for_another_leader() -> None:
    async def main() -> None:
        store = Store()
        leader = Leader(store, 1)
        await leader.write("first")
        store.trouble = ["down"]
        with pytest.raises(JournalFailed):
            await leader.write("second")
        assert await leader.journal.records() == {"job": "first"}
        store.trouble = ["answer lost"]
        with pytest.raises(JournalFailed):
            await leader.write("second")
        await leader.write("third")
        assert not leader.lost.is_set()
        assert await leader.journal.records() == {"job": "third"}
        await leader.journal.aclose()

    asyncio.run(main())


def test_ended_job_leaves_no_record_but_its_history() -> None:
    async def main() -> None:
        store = Store()
        leader = Leader(store, 1)
        await leader.write("first")
        await leader.write("last", ended=True)
        assert store.stored == {}
        assert await leader.journal.records() == {}
        await leader.journal.note("declared/x", "text")
        await leader.journal.note("declared/x", None)
        assert store.stored == {}
        await leader.journal.aclose()

    asyncio.run(main())


def test_record_of_another_program_is_named_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        store = Store({"job": Stored(Record(1, 1, '{"other": 1}'), "0")})
        leader = Leader(store, 2)
        await leader.journal.claim()
        assert await leader.journal.records() == {}
        assert "job=job cannot be restored" in caplog.text
        await leader.write("fresh")
        assert store.stored["job"].record.sequence == 2
        await leader.journal.aclose()

    asyncio.run(main())


def entry(number: int, because: str = "") -> Entry:
    return Entry("job", number, float(number), "event", "Idle", "Stopping", because, ("order",))


async def history(leader: Leader) -> list[Entry]:
    return [replace(one, number=0) for one in await leader.journal.history("job")]


def test_next_leader_knows_the_history_of_all_former_ones() -> None:
    async def main() -> None:
        store = Store()
        entries = [entry(number) for number in range(4)]
        leaders = [Leader(store, epoch) for epoch in (1, 2, 3)]
        await leaders[0].write("first", entries=(entries[0], entries[1]))
        await leaders[1].journal.claim()
        await leaders[1].write("second", entries=(entries[2],))
        await leaders[1].journal.add_entry(entries[3])
        await leaders[1].journal.note("pods/job", "two")
        await leaders[2].journal.claim()
        assert await history(leaders[2]) == entries
        for leader in leaders:
            await leader.journal.aclose()

    asyncio.run(main())


def test_long_history_is_kept_in_pages_up_to_a_limit() -> None:
    async def main() -> None:
        store = Store()
        old, new = Leader(store, 1), Leader(store, 2)
        written = [entry(number, "x" * PAGE_CHARS) for number in range(MOST_PAGES + 10)]
        for one in written:
            await old.write("state", entries=(one,))
        assert len(store.stored) == MOST_PAGES + 1
        await new.journal.claim()
        assert await history(new) == written[-MOST_PAGES - 1 :]
        await new.write("end", ended=True)
        assert store.stored == {}
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())


def test_page_that_was_written_without_the_record_is_written_again() -> None:
    async def main() -> None:
        store = Store()
        old, new = Leader(store, 1), Leader(store, 2)
        await old.write("first", entries=(entry(0, "x" * PAGE_CHARS),))
        store.trouble = ["", "down"]
        with pytest.raises(JournalFailed):
            await old.write("second", entries=(entry(1),))
        await old.write("second", entries=(entry(1),))
        await new.journal.claim()
        assert [one.incident for one in await history(new)] == [0, 1]
        for leader in (old, new):
            await leader.journal.aclose()

    asyncio.run(main())
