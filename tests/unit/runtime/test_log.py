from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from taskd.python.utils.log.logger import CustomRotatingHandler, LogConfig, MaxLengthFormatter
from taskd.runtime import log, plain_text
from taskd.runtime.log_file import RotatingHandler

FIRST_LINE = "from taskd.python.utils.log import run_log\nrun_log.info('one %s', 1)\n"


def child(code: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("TASKD_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**base, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def record(message: str, *arguments: object) -> logging.LogRecord:
    return logging.LogRecord("taskd", logging.INFO, "file.py", 3, message, arguments, None)


def test_importing_writes_nothing(tmp_path: Path) -> None:
    done = child("import taskd, taskd.api, taskd.python.utils.log", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", ["0o000", "0o022", "0o077"])
def test_first_line_creates_directory_and_file(tmp_path: Path, umask: str) -> None:
    done = child(f"import os; os.umask({umask})\n" + FIRST_LINE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert mode(tmp_path / "taskd_log") == 0o750
    assert mode(tmp_path / "taskd_log" / "taskd.log") == 0o640
    line = (tmp_path / "taskd_log" / "taskd.log").read_text()
    pattern = (
        r"\[INFO\]     \d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.000\d{3} \d+   <string>:\d+     one 1\n"
    )
    assert re.fullmatch(pattern, line), line
    assert done.stdout == line


def test_settings(tmp_path: Path) -> None:
    code = FIRST_LINE + "run_log.debug('two'); run_log.warning('three')"
    done = child(
        code,
        tmp_path,
        TASKD_LOG_PATH=str(tmp_path / "x" / "y"),
        TASKD_FILE_LOG_LEVEL="DEBUG",
        TASKD_STD_LOG_LEVEL="WARNING",
    )
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["three"]
    lines = (tmp_path / "x" / "y" / "taskd.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines] == ["1", "two", "three"]


def test_standard_output_can_be_switched_off(tmp_path: Path) -> None:
    done = child(FIRST_LINE, tmp_path, TASKD_LOG_STDOUT="False")
    assert done.stdout == ""
    assert (tmp_path / "taskd_log" / "taskd.log").exists()


def test_invalid_level_is_reported_and_other_settings_apply(tmp_path: Path) -> None:
    done = child(FIRST_LINE, tmp_path, TASKD_FILE_LOG_LEVEL="LOUD", TASKD_LOG_STDOUT="False")
    assert done.returncode == 0
    assert "TASKD_FILE_LOG_LEVEL must be Level, got 'LOUD'" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("obstacle", ["file", "link", "dangling", "logfile-link"])
def test_lines_go_to_standard_error_if_the_file_cannot_be_opened(
    tmp_path: Path, obstacle: str
) -> None:
    folder = tmp_path / "taskd_log"
    match obstacle:
        case "file":
            folder.touch()
        case "link":
            (tmp_path / "there").mkdir()
            folder.symlink_to(tmp_path / "there")
        case "dangling":
            folder.symlink_to(tmp_path / "nowhere")
        case _:
            folder.mkdir()
            (folder / "taskd.log").symlink_to(tmp_path / "stolen")
    code = FIRST_LINE + "run_log.info('two')"
    done = child(code, tmp_path, TASKD_LOG_STDOUT="False")
    warning, first, second = done.stderr.splitlines()
    assert warning.startswith("taskd: cannot write the log file, writing to standard error: ")
    assert first.endswith("one 1")
    assert second.endswith("two")
    assert not (tmp_path / "stolen").exists()


def test_any_mode_of_an_existing_directory_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "taskd_log").mkdir(mode=0o755)
    assert child(FIRST_LINE, tmp_path).stderr == ""
    assert (tmp_path / "taskd_log" / "taskd.log").exists()


def test_file_is_used_again_once_it_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").touch()
    handler = RotatingHandler(tmp_path / "logs" / "taskd.log")
    handler.emit(record("lost"))
    (tmp_path / "logs").unlink()
    handler.emit(record("kept"))
    handler.close()
    assert (tmp_path / "logs" / "taskd.log").read_text() == "kept\n"
    assert capsys.readouterr().err.endswith("lost\n")


def test_each_record_is_one_line() -> None:
    formatter = MaxLengthFormatter("%(message)s", 20)
    assert formatter.format(record("a\nb\tc\x1b[0m\x85")) == r"a\nb\tc\x1b[0m\x85"
    assert formatter.format(record("x" * 21)) == "x" * 20 + "..."
    assert formatter.format(record("ä %s", "中")) == "ä 中"


def test_traceback_cannot_forge_a_record() -> None:
    formatter = MaxLengthFormatter("%(message)s", 100)
    try:
        raise RuntimeError("first\n[ERROR] forged")
    except RuntimeError:
        failed = logging.LogRecord("x", 40, "f", 1, "it failed", None, sys.exc_info())
    first, *others = formatter.format(failed).splitlines()
    assert first == "it failed"
    assert all(line.startswith("    ") for line in others)


@pytest.mark.parametrize("kind", [log.OneLineFormatter, plain_text.OneLineFormatter])
def test_text_of_a_peer_cannot_change_the_terminal(kind: type[logging.Formatter]) -> None:
    """Nor make the line unreadable or unwritable; in the message, and in a traceback."""
    hostile = "\x1b[2J \u202egnp.exe \ud800 \x9b1m \u2028"
    try:
        raise ValueError(hostile)
    except ValueError:
        failed = record("%s", hostile)
        failed.exc_info = sys.exc_info()
    formatter = kind("%(message)s", 1000) if kind is log.OneLineFormatter else kind("%(message)s")
    text = formatter.format(failed)
    assert "gnp.exe" in text
    assert all(plain_text.is_plain(line) for line in text.split("\n"))
    text.encode()


def test_record_with_wrong_arguments_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = RotatingHandler(tmp_path / "taskd.log")
    handler.emit(record("%d", "no number"))
    assert not (tmp_path / "taskd.log").exists()


def test_rotation_keeps_the_newest_backups(tmp_path: Path) -> None:
    handler = CustomRotatingHandler(tmp_path / "taskd.log", maxBytes=20, backupCount=3)
    (tmp_path / "taskd-mine.log").touch()
    (tmp_path / "taskd-9999-99-99T99-99-99.999.log").touch()
    (tmp_path / "taskd-2001-01-01T00-00-00.000.log").touch()
    for number in range(10):
        handler.emit(record("line number %03d", number))
    handler.close()
    backups = sorted(tmp_path.glob("taskd-2*.log"))
    assert [path.read_text() for path in backups] == [
        f"line number {number:03}\n" for number in (6, 7, 8)
    ]
    assert (tmp_path / "taskd.log").read_text() == "line number 009\n"
    assert {mode(path) for path in backups} == {0o440}
    assert mode(tmp_path / "taskd.log") == 0o640
    assert (tmp_path / "taskd-mine.log").exists()


def test_removed_file_is_created_again(tmp_path: Path) -> None:
    handler = RotatingHandler(tmp_path / "taskd.log")
    handler.emit(record("one"))
    (tmp_path / "taskd.log").unlink()
    handler.emit(record("two"))
    handler.close()
    assert (tmp_path / "taskd.log").read_text() == "two\n"


WRITER = """
import logging, sys
from taskd.runtime.log_file import RotatingHandler
handler = RotatingHandler(sys.argv[1], max_bytes=2000, backups=1000)
for number in range(300):
    handler.emit(logging.makeLogRecord({"msg": f"{sys.argv[2]} {number}"}))
"""


def test_processes_that_share_a_file_lose_no_line(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "taskd.log"), name])
        for name in "abc"
    ]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    written = [line for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
    assert sorted(written) == sorted(f"{name} {number}" for name in "abc" for number in range(300))
    assert len(list(tmp_path.iterdir())) > 1


def test_each_invalid_setting_gets_its_default() -> None:
    environment: Mapping[str, str] = {"TASKD_LOG_STDOUT": "maybe", "TASKD_STD_LOG_LEVEL": "ERROR"}
    chosen, problems = log.settings(environment)
    assert chosen == log.LogSettings(std_log_level=log.Level.ERROR)
    assert problems == ["TASKD_LOG_STDOUT must be bool, got 'maybe'"]


def test_documented_names_show_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKD_LOG_PATH", "/there")
    config = LogConfig()
    assert (config.log_path, config.file_log_level, config.log_stdout) == ("/there", "INFO", True)
