"""The journal: durable, shared by many, bounded, and clear about what it cannot do."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_reader import salvage
from taskd.runtime.journal.journal_values import (
    Entry,
    JournalConfig,
    JournalFailed,
    JournalUnusable,
    Write,
)


def entry(job: str, number: int, incident: int = 1) -> Entry:
    return Entry(job, incident, float(number), f"event {number}", "A", "B", "why", ("do this",))


def write(job: str, number: int, *, ended: bool = False) -> Write:
    return Write(job, f"record {number}", float(number), (entry(job, number),), ended)


def test_records_survive_reopening(tmp_path: Path) -> None:
    async def first() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.append(write("job", 1))
        await journal.append(write("job", 2))
        await journal.aclose()

    async def second() -> None:
        journal = Journal(tmp_path / "journal")
        assert await journal.records() == {"job": "record 2"}
        assert await journal.newest() == 2.0
        history = await journal.history("job")
        assert [line.event for line in history] == ["event 1", "event 2"]
        assert history[0].commands == ("do this",)
        assert history[0].number < history[1].number
        await journal.aclose()

    asyncio.run(first())
    asyncio.run(second())


def test_history_of_one_incident() -> None:
    async def main() -> None:
        journal = Journal(None)
        for number in range(6):
            await journal.append(Write("job", "r", 0.0, (entry("job", number, number // 2),)))
        assert [line.event for line in await journal.history("job", 2)] == ["event 4", "event 5"]
        assert await journal.history("other") == []
        await journal.aclose()

    asyncio.run(main())


def test_concurrent_jobs_share_transactions(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        await asyncio.gather(*(journal.append(write(f"job{n}", n)) for n in range(500)))
        assert len(await journal.records()) == 500
        assert journal.transactions < 100
        await journal.aclose()

    asyncio.run(main())


def test_second_server_on_the_same_file_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    with pytest.raises(JournalUnusable, match="locked"):
        Journal(tmp_path / "journal")
    journal.close()
    Journal(tmp_path / "journal").close()


def test_newer_version_or_other_file_is_refused(tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    connection = sqlite3.connect(newer)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(JournalUnusable, match="version 99"):
        Journal(newer)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalUnusable, match="not a database"):
        Journal(foreign)
    with pytest.raises(JournalUnusable, match="cannot be opened"):
        Journal(tmp_path / "no such directory" / "journal")


def test_journal_stays_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal", JournalConfig(entries_per_job=20, ended_jobs=3))
        for number in range(200):
            await journal.append(write("long", number))
        history = await journal.history("long")
        assert 20 <= len(history) <= 26
        assert history[-1].event == "event 199"
        for number in range(200):
            await journal.add_entry(entry("long", number))
        assert len(await journal.history("long")) <= 26
        for number in range(10):
            await journal.append(write(f"short{number}", number, ended=True))
        assert await journal.record("short9") == "record 9"
        assert await journal.record("short0") is None
        assert await journal.history("short0") == []
        assert await journal.records() == {"long": "record 199"}
        await journal.aclose()

    asyncio.run(main())


def test_long_entries_are_kept_up_to_a_length_and_read_in_parts(tmp_path: Path) -> None:
    """Also after a restart, and the newest one however long it is."""

    async def main() -> None:
        for start in (0, 100):
            journal = Journal(tmp_path / "journal", JournalConfig(bytes_per_job=10_000))
            for number in range(start, start + 100):
                await journal.add_entry(replace(entry("job", number), event="x" * 1_000))
                await journal.add_entry(entry("other", number))
            whole = await journal.history("job")
            assert 8 <= len(whole) <= 13
            assert whole[-1].at == start + 99
            read: list[Entry] = []
            while part := await journal.history(
                "job", after=read[-1].number if read else 0, most_bytes=3_000
            ):
                assert len(part) <= 3
                read += part
            assert read == whole
            assert len(await journal.history("other")) == start + 100
            await journal.aclose()
        journal = Journal(tmp_path / "journal", JournalConfig(bytes_per_job=10_000))
        await journal.add_entry(replace(entry("job", 200), event="x" * 50_000))
        assert [line.at for line in await journal.history("job")] == [200.0]
        await journal.aclose()

    asyncio.run(main())


def test_write_ahead_log_is_copied_into_the_database(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        for number in range(60):
            await journal.append(Write("job", "x" * 200_000, float(number)))
        assert (tmp_path / "journal-wal").stat().st_size < 6_000_000
        await journal.aclose()

    asyncio.run(main())


@contextmanager
def disk_full_at(size: int) -> Iterator[None]:
    """No file may grow past this size: what a full disk looks like to SQLite."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.append(write("job", 1))
        with disk_full_at((tmp_path / "journal-wal").stat().st_size):
            with pytest.raises(JournalFailed, match="cannot be written"):
                await journal.append(write("job", 2))
            assert await journal.records() == {"job": "record 1"}
        await journal.append(write("job", 3))
        assert [line.event for line in await journal.history("job")] == ["event 1", "event 3"]
        await journal.aclose()

    asyncio.run(main())


def test_unwritable_value_is_refused_and_the_next_write_works(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        for unwritable in (Write("a", "half a pair: \ud800", 0.0), Write("b", "r", 0.0, (BEYOND,))):
            with pytest.raises(JournalFailed):
                await journal.append(unwritable)
        await journal.append(Write("job", "r", 0.0, (replace(BEYOND, job="job", incident=1),)))
        assert await journal.records() == {"job": "r"}
        (line,) = await journal.history("job")
        assert line.because == "no file 'caf?'"
        await journal.aclose()

    asyncio.run(main())


BEYOND = Entry("b", 2**70, 0.0, "event", "A", "B", "no file 'caf\udce9'")


def test_other_users_cannot_read_the_journal(tmp_path: Path) -> None:
    async def main() -> None:
        journal = Journal(tmp_path / "journal")
        await journal.append(write("job", 1))
        modes.extend(await asyncio.to_thread(_modes, tmp_path))
        await journal.aclose()

    modes: list[int] = []
    asyncio.run(main())
    assert len(modes) >= 2
    assert not any(mode & 0o077 for mode in modes)


def _modes(folder: Path) -> list[int]:
    return [path.stat().st_mode for path in folder.iterdir()]


def test_closed_journal_refuses_requests() -> None:
    async def main() -> None:
        journal = Journal(None)
        await journal.aclose()
        with pytest.raises(JournalFailed, match="closed"):
            await journal.append(write("job", 1))

    asyncio.run(main())


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_journal_cut_in_half_is_read_up_to_the_damage(tmp_path: Path, share: float) -> None:
    async def fill() -> None:
        journal = Journal(tmp_path / "journal", JournalConfig(entries_per_job=2_000))
        for number in range(300):
            await journal.add_entry(replace(entry("job", number), event="x" * 500))
        await journal.aclose()

    asyncio.run(fill())
    path = tmp_path / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    found = salvage(path, "job")
    assert 0 < len(found) < 300
    numbers = [each.number for each in found]
    assert numbers[0] == 1
    assert numbers == sorted(set(numbers))
    path.write_bytes(b"not a journal")
    assert salvage(path, "job") == []
