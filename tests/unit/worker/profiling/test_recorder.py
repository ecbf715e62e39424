"""Between the training thread and the disk: what does not fit is told."""

from __future__ import annotations

import threading
from pathlib import Path

from taskd.worker.profiling.record_files import Shelf
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.records import Span

NEVER_S = 1000.0
"""It saves when it is told to, not by itself."""


class Unended:
    recorded = True

    def settled(self) -> Span | None:
        return None


def recorder(tmp_path: Path) -> Recorder:
    return Recorder(Shelf(tmp_path, "job", 0, 100), NEVER_S, lambda: None, most=3)


def span(number: int) -> Span:
    return Span("default", f"step {number}", number, number + 1, number, threading.get_ident())


def test_records_that_pile_up_are_told_until_there_is_room_again(tmp_path: Path) -> None:
    kept = recorder(tmp_path)
    for number in range(5):
        kept.add(span(number))
    kept.flush()
    assert "the oldest are lost" in kept.problem
    (file,) = (tmp_path / "job/0").iterdir()
    assert [f'"step {number}"' in file.read_text() for number in range(5)] == [False] * 2 + [
        True
    ] * 3
    kept.add(span(5))
    kept.flush()
    assert kept.problem == ""
    kept.close()


def test_collectives_that_never_end_are_told(tmp_path: Path) -> None:
    kept = recorder(tmp_path)
    for _ in range(2):
        kept.add_later(Unended())
    kept.flush()
    assert kept.problem == ""
    kept.add_later(Unended())
    kept.flush()
    assert "the oldest are lost" in kept.problem
    kept.close()
