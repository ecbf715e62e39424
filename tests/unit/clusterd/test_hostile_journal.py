"""`taskd replay --journal FILE` of a file that was made to harm its reader."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from taskd.cli import main
from taskd.commands.replay import read_journal
from taskd.dashboard import report
from taskd.runtime.journal.journal_file import CREATE, SCHEMA
from taskd.runtime.journal.journal_rows import with_sum
from taskd.runtime.journal.journal_values import JournalFailed, JournalUnusable
from taskd.wire._pb import control_pb2 as pb

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n)"
ROW = (7, "job", 1, 100.0, "FaultReport", "Idle", "Stopping", "fault of rank 1")


def written(path: Path, *rows: tuple[Any, ...], commands: str = "[]") -> Path:
    """A journal with these entries, whose checksums are right."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{CREATE} PRAGMA user_version = {SCHEMA};")
        for row in rows:
            stored = with_sum(commands, *row[1:])
            connection.execute(f"INSERT INTO entries VALUES ({'?,' * 8}?)", (*row, stored))
        connection.commit()
    return path


@pytest.mark.parametrize("at", [1e300, -1e300, float("inf"), 2.0**62, -1.0])
@pytest.mark.parametrize("incident", [1, 2**62, -(2**62)])
def test_impossible_numbers_are_shown_somehow(tmp_path: Path, at: float, incident: int) -> None:
    row = (*ROW[:2], incident, at, *ROW[4:])
    path = written(tmp_path / "journal", row, (8, *ROW[1:]))
    lines, _ = read_journal(path, pb.ReplayRequest(job="job"))
    assert lines[1].because == "fault of rank 1"
    assert lines[0].event in ("DamagedEntry", "FaultReport")
    report.page(report.data_of("job", lines, 1_000))
    for words in (["replay", "job"], ["replay", "job", "--json"]):
        assert main([*words, "--journal", str(path)]) == 0


@pytest.mark.parametrize(
    "commands", ["{}", "[1, null]", "nothing", "[" * 100_000, '"text"', "[[]]", "7"]
)
def test_commands_that_are_no_list_of_texts_are_damaged(tmp_path: Path, commands: str) -> None:
    path = written(tmp_path / "journal", ROW, commands=commands)
    (line,), _ = read_journal(path, pb.ReplayRequest(job="job"))
    assert (line.event, list(line.commands)) == ("DamagedEntry", [])


@pytest.mark.parametrize(
    "value", [b"\xff\xfe", 5, b"\x00" * 100, "a\x1b[2Jb\n2026 forged", "x" * 5_000_000]
)
def test_texts_of_another_type_are_shown_somehow(
    tmp_path: Path, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    row = (*ROW[:4], value, *ROW[5:])
    path = written(tmp_path / "journal", row)
    assert main(["replay", "job", "--journal", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    (line,), _ = read_journal(path, pb.ReplayRequest(job="job"))
    report.page(report.data_of("job", [line], 1_000))


def endless_view(connection: sqlite3.Connection) -> None:
    connection.execute("DROP TABLE entries")
    columns = "x number, 'job' job, 1 incident, 1.0 at, '' event, '' before, '' after"
    select = f"SELECT {columns}, '' because, '' commands FROM n"
    connection.execute(f"CREATE VIEW entries AS {ENDLESS} {select}")


def computed_column(connection: sqlite3.Connection) -> None:
    """Columns that are computed when they are read."""
    connection.execute("DROP TABLE entries")
    names = "number, job, incident, at, event, before, after"
    connection.execute(f"CREATE TABLE entries ({names}, commands, because AS ('computed'))")
    connection.execute("INSERT INTO entries VALUES (1, 'job', 1, 1.0, '', '', '', '[]')")


@pytest.mark.parametrize("damage", [endless_view, computed_column])
@pytest.mark.timeout(30)
def test_tables_that_are_programs_are_not_run(
    tmp_path: Path, damage: Callable[[sqlite3.Connection], None]
) -> None:
    path = written(tmp_path / "journal")
    with closing(sqlite3.connect(path)) as connection:
        damage(connection)
        connection.commit()
    with pytest.raises((JournalFailed, JournalUnusable)):
        read_journal(path, pb.ReplayRequest(job="job"))


def test_reading_changes_nothing(tmp_path: Path) -> None:
    """It may be the only evidence there is."""
    path = written(tmp_path / "journal", ROW)
    path.chmod(0o400)
    before = path.read_bytes(), sorted(tmp_path.iterdir())
    assert len(read_journal(path, pb.ReplayRequest(job="job"))[0]) == 1
    assert (path.read_bytes(), sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("kind", ["fifo", "directory", "missing"])
@pytest.mark.timeout(30)
def test_what_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    import os

    path = tmp_path / "journal"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    with pytest.raises((JournalFailed, JournalUnusable)):
        read_journal(path, pb.ReplayRequest(job="job"))
    assert path.exists() == (kind != "missing"), "it is not created"
