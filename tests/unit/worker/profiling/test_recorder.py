"""The recorder reports records that it loses between the training thread and the disk."""

from __future__ import annotations

import threading
from pathlib import Path

from taskd.worker.profiling.record_files import RecordFiles
from taskd.worker.profiling.recorder import Recorder
from taskd.worker.profiling.records import Span

NEVER_S = 1000.0
"""The recorder saves only when the test calls it."""


class Unfinished:
    recorded = True

    def finished(self) -> Span | None:
        return None


def recorder(tmp_path: Path) -> Recorder:
    return Recorder(RecordFiles(tmp_path, "job", 0, 100), NEVER_S, lambda: None, most=3)


def span(number: int) -> Span:
    return Span("default", f"step {number}", number, number + 1, number, threading.get_ident())


def test_lost_records_are_reported_until_there_is_room_again(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    for number in range(5):
        recording.add(span(number))
    recording.flush()
    assert "the oldest are lost" in recording.problem
    (file,) = (tmp_path / "job/0").iterdir()
    assert [f'"step {number}"' in file.read_text() for number in range(5)] == [False] * 2 + [
        True
    ] * 3
    recording.add(span(5))
    recording.flush()
    assert recording.problem == ""
    recording.close()


def test_collectives_that_never_end_are_reported(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    for _ in range(2):
        recording.add_pending(Unfinished())
    recording.flush()
    assert recording.problem == ""
    recording.add_pending(Unfinished())
    recording.flush()
    assert "the oldest are lost" in recording.problem
    recording.close()
