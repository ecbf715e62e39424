"""Where lines go: prefixes, files, filters, a full disk, a closed console."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from taskd.agent.worker_output import Sink, WorkerOutput


def flow(text: bytes, **more: object) -> tuple[bytes, str]:
    """What the console gets of a worker's text, and the last lines that are kept."""
    read, write = os.pipe()
    output = WorkerOutput()
    sink = Sink(prefix=b"[0] ", console=write, **more)  # type: ignore[arg-type]
    (end,) = output.open("worker", (sink,))
    os.write(end, text)
    os.close(end)
    tail = output.close("worker")
    output.stop()
    os.close(write)
    with os.fdopen(read, "rb") as console:
        return console.read(), tail


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"one\ntwo\n", b"[0] one\n[0] two\n"),
        (b"no end", b"[0] no end"),
        (b"10%\r20%\r30%\n", b"[0] 10%\r[0] 20%\r[0] 30%\n"),
        (b"dos\r\nlines\r\n", b"[0] dos\r\n[0] lines\r\n"),
        (b"", b""),
    ],
)
def test_every_line_gets_prefix(text: bytes, shown: bytes) -> None:
    assert flow(text)[0] == shown


def test_very_long_line_is_passed_on_completely() -> None:
    output = WorkerOutput()
    (end,) = output.open("worker", (Sink(prefix=b"", console=None),))
    for _ in range(64):
        os.write(end, b"x" * 65_536)  # blocks until it has been read
    os.close(end)
    tail = output.close("worker", timeout_s=60.0)
    output.stop()
    assert len(tail.replace("\n", "")) == 64 * 65_536


def test_last_lines_are_kept() -> None:
    text = b"".join(b"line %d\n" % number for number in range(100))
    assert flow(text)[1].splitlines() == [f"line {number}" for number in range(60, 100)]


def test_files_get_lines_without_prefix(tmp_path: Path) -> None:
    path, filtered = tmp_path / "log", tmp_path / "filtered"
    flow(b"apple\npear\n", path=str(path), collect=str(filtered), words=(b"pear",))
    assert path.read_bytes() == b"apple\npear\n"
    assert filtered.read_bytes() == b"pear\n"


def test_full_disk_stops_log_file_but_not_training(capfd: pytest.CaptureFixture[str]) -> None:
    shown, _ = flow(b"one\ntwo\n", path="/dev/full")
    assert shown == b"[0] one\n[0] two\n"
    assert "/dev/full: No space left on device" in capfd.readouterr().err


def test_closed_console_does_not_stop_log_file(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    output = WorkerOutput()
    path = tmp_path / "log"
    (end,) = output.open("worker", (Sink(prefix=b"", console=write, path=str(path)),))
    os.write(end, b"still written\n")
    os.close(end)
    output.close("worker")
    output.stop()
    os.close(write)
    assert path.read_bytes() == b"still written\n"
