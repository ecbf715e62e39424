"""A damaged journal costs the rows that are damaged, and every one of them is named."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskd.clusterd.cluster.declared_jobs import Declaration
from taskd.clusterd.cluster.in_memory import InMemoryCluster
from taskd.clusterd.services.profiling_service import ProfilingService, note_name
from taskd.model.ids import JobId
from taskd.runtime.journal import journal_rows
from taskd.runtime.journal.journal import Journal
from taskd.runtime.journal.journal_values import JournalFailed, Write
from tests.unit.clusterd.test_clusterd_parts import joined, make_jobs

JOBS = ("a", "b", "c")
COLUMNS = {
    "jobs": ("job", ["job", "record", "ended", "changed"]),
    "notes": ("name", ["name", "text"]),
    "entries": ("number", ["job", "incident", "at", "event", "before", "because", "commands"]),
}
values = st.one_of(
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.binary(max_size=40),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.sampled_from(["{}", "[]", "null", '{"~": "Record"}', "[" * 5000]),
)


async def _write(path: Path) -> None:
    journal, cluster = Journal(path), InMemoryCluster()
    jobs = make_jobs([1.0], journal, cluster)
    await jobs.start()
    for name in JOBS:
        await jobs.declare(Declaration(JobId(name), "retry", name=name))
        assert await joined(jobs, name) == 0
        await journal.note(note_name(JobId(name)), '{"Step": "on"}')
    await jobs.close()
    await journal.aclose()


async def _read(path: Path) -> tuple[set[str], list[str], int]:
    """The jobs that are served, the history of all, and how often the profiling is on."""
    journal, cluster = Journal(path), InMemoryCluster()
    try:
        assert await journal.newest() >= 0
        jobs = make_jobs([1.0], journal, cluster)
        await jobs.start()
        profiling = ProfilingService(jobs, cluster, journal)
        await profiling.start()
        entries = [one.event for job in JOBS for one in await journal.history(job)]
        served: set[str] = set(jobs.served)
        await jobs.close()
        return served, entries, len(profiling._switches)
    finally:
        await journal.aclose()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "journal"
    asyncio.run(_write(path))
    return path


def edit(path: Path, table: str, row: int, column: str, value: Any) -> bool:
    """Change one value. False: it is what it was, or SQLite cannot store it."""
    key = COLUMNS[table][0]
    with sqlite3.connect(path) as connection:
        names = [name for (name,) in connection.execute(f"SELECT {key} FROM {table} ORDER BY 1")]
        name = names[row % len(names)]
        where = f"WHERE {key} IS ?"
        (before,) = connection.execute(f"SELECT {column} FROM {table} {where}", (name,)).fetchone()
        try:
            connection.execute(f"UPDATE {table} SET {column} = ? {where}", (value, name))
        except (sqlite3.IntegrityError, OverflowError):
            return False
        (after,) = connection.execute(
            f"SELECT {column} FROM {table} WHERE {key} IS ?",
            (value if column == key else name,),
        ).fetchone() or (None,)
    connection.close()
    return bool(before != after)


def copied(original: Path, folder: str) -> Path:
    path = Path(folder) / "journal"
    path.write_bytes(original.read_bytes())
    return path


@settings(max_examples=40)
@given(st.sampled_from(sorted(COLUMNS)), st.integers(0, 20), st.data(), values)
def test_one_edited_value_costs_at_most_its_row(
    original: Path, table: str, row: int, data: st.DataObject, value: Any
) -> None:
    column = data.draw(st.sampled_from(COLUMNS[table][1]))
    with tempfile.TemporaryDirectory() as folder:
        path = copied(original, folder)
        changed = edit(path, table, row, column, value)
        served, entries, switches = asyncio.run(_read(path))
        if changed and column not in ("job", "name", "number"):
            assert served != set(JOBS) or "DamagedEntry" in entries or table == "notes"
        assert len(served & set(JOBS)) >= (2 if table == "jobs" else 3)
        assert len(entries) >= 2
        assert switches >= 2


@pytest.mark.parametrize("table", ["jobs", "notes"])
def test_damaged_row_is_named_put_aside_and_not_met_again(
    original: Path, table: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = copied(original, str(tmp_path))
    column = COLUMNS[table][1][1]
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE {table} SET {column} = replace({column}, 'a', 'b')")
    connection.close()
    with caplog.at_level(logging.ERROR):
        asyncio.run(_read(path))
    assert f"of {table} is damaged and is not used" in caplog.text
    caplog.clear()
    asyncio.run(_read(path))
    assert "damaged" not in caplog.text
    with sqlite3.connect(path) as connection:
        kept = connection.execute("SELECT place, name FROM damaged").fetchall()
    connection.close()
    assert kept


def test_damaged_entry_is_shown_as_such(original: Path, tmp_path: Path) -> None:
    path = copied(original, str(tmp_path))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE entries SET because = 'all is well' WHERE number = 1")
    connection.close()
    assert "DamagedEntry" in asyncio.run(_read(path))[1]


def test_checksum_covers_the_whole_row() -> None:
    assert journal_rows.without_sum('{"a": 1}', "job") is None
    stored = journal_rows.with_sum("text", "job", 1)
    assert journal_rows.without_sum(stored, "job", 1) == "text"
    assert journal_rows.without_sum(stored, "another job", 1) is None


def test_journal_that_is_deleted_while_in_use_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"

    async def main() -> None:
        journal = Journal(path)
        await journal.append(Write("a", "first", 1.0))
        path.unlink()
        await journal.append(Write("b", "second", 2.0))
        assert path.stat().st_mode & 0o077 == 0
        await journal.aclose()
        again = Journal(path)
        assert await again.records() == {"a": "first", "b": "second"}
        await again.aclose()

    asyncio.run(main())
    assert "was deleted while in use" in caplog.text


def test_journal_is_whole_again_once_the_other_file_is_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def main() -> None:
        journal = Journal(path)
        await journal.append(Write("a", "first", 1.0))
        path.unlink()
        path.write_text("of another program")
        for _ in range(2):
            with pytest.raises(JournalFailed, match="move it away"):
                await journal.append(Write("b", "refused", 2.0))
        path.rename(tmp_path / "moved")
        await journal.append(Write("c", "third", 3.0))
        await journal.aclose()
        again = Journal(path)
        assert await again.records() == {"a": "first", "c": "third"}
        await again.aclose()

    asyncio.run(main())


def test_deleted_journal_is_written_again_once_there_is_room(tmp_path: Path) -> None:
    path, obstacle = tmp_path / "journal", tmp_path / "journal.again"

    async def main() -> None:
        journal = Journal(path)
        await journal.append(Write("a", "first", 1.0))
        path.unlink()
        obstacle.mkdir()
        with pytest.raises(JournalFailed):
            await journal.append(Write("b", "refused", 2.0))
        obstacle.rmdir()
        await journal.append(Write("c", "third", 3.0))
        assert await journal.records() == {"a": "first", "c": "third"}
        await journal.aclose()

    asyncio.run(main())


def test_journal_that_is_deleted_after_a_failure_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def main() -> None:
        journal = Journal(path)
        await journal.append(Write("a", "first", 1.0))
        with pytest.raises(JournalFailed):
            await journal.append(Write("b", "\ud800", 2.0))
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        await journal.append(Write("c", "third", 3.0))
        await journal.append(Write("d", "fourth", 4.0))
        assert await journal.records() == {"c": "third", "d": "fourth"}
        await journal.aclose()

    asyncio.run(main())


def test_file_in_the_place_of_the_journal_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def main() -> None:
        journal = Journal(path)
        await journal.append(Write("a", "first", 1.0))
        path.rename(tmp_path / "moved")
        path.write_text("of another program")
        with pytest.raises(JournalFailed, match="another file has taken the place"):
            await journal.append(Write("b", "second", 2.0))
        assert path.read_text() == "of another program"
        path.unlink()
        (tmp_path / "moved").rename(path)
        await journal.append(Write("b", "second", 2.0))
        await journal.aclose()

    asyncio.run(main())
