"""The reset files: what FaultProcessor reads from them, and how processes are ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented import reset_files
from taskd.python.toolkit.fault_checker import fault_check
from taskd.python.toolkit.fault_checker.fault_check import FaultProcessor, ResetCmData

WAIT_S = 20.0


class Files:
    """The reset files of one pod."""

    def __init__(self, folder: Path) -> None:
        self.processor = FaultProcessor()
        self.processor.reset_cm_path = str(folder / "reset.json")
        self.processor.restart_type_path = str(folder / "restartType")
        self.processor.rank_version_path = str(folder / "version")

    def reset(self, ranks: list[Any] | None = None, **others: Any) -> None:
        content = {"RankList": [] if ranks is None else ranks, **others}
        Path(self.processor.reset_cm_path).write_text(json.dumps(content))

    def restart_type(self, text: str) -> None:
        Path(self.processor.restart_type_path).write_text(text)

    def version(self, text: str) -> None:
        Path(self.processor.rank_version_path).write_text(text)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def rank(number: int, status: str = "fault") -> dict[str, Any]:
    return {"RankId": number, "Status": status}


GROUP = SimpleNamespace(workers=[SimpleNamespace(global_rank=8), SimpleNamespace(global_rank=9)])


def test_all_values_are_read_and_ranks_are_sorted(files: Files) -> None:
    files.reset(
        [rank(9), rank(2)],
        RetryTime=3,
        GracefulExit=1,
        FaultFlushing=True,
        RestartFaultProcess=True,
        UpdateTime=7,
    )
    files.restart_type("hotReset\n")
    assert files.processor.get_reset_info_from_cm() == ResetCmData(
        fault_ranks=[rank(2), rank(9)],
        retry_time=3,
        grace_exit=1,
        restart_type="hotReset",
        fault_flush=True,
        restart_fault_process=True,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"RankList": 3, "RetryTime": "1", "GracefulExit": true, "FaultFlushing": 1}',
        '{"RankList": ["x", {}, {"RankId": "1"}, {"RankId": true}]}',
    ],
)
def test_invalid_values_get_their_defaults(files: Files, text: str) -> None:
    Path(files.processor.reset_cm_path).write_text(text)
    assert files.processor.get_reset_info_from_cm() == ResetCmData()


def test_missing_linked_and_large_files_are_not_read(files: Files, tmp_path: Path) -> None:
    assert files.processor.get_reset_info_from_cm() == ResetCmData()
    (tmp_path / "there").write_text('{"RetryTime": 1}')
    Path(files.processor.reset_cm_path).symlink_to(tmp_path / "there")
    assert files.processor.get_reset_info_from_cm() == ResetCmData()
    Path(files.processor.reset_cm_path).unlink()
    Path(files.processor.reset_cm_path).write_text('{"RetryTime": 1}' + " " * 1024 * 1024)
    assert files.processor.get_reset_info_from_cm() == ResetCmData()


def test_fault_of_this_node_is_reported_until_handled(files: Files) -> None:
    files.reset([rank(9), rank(1)], RestartFaultProcess=True)
    status = files.processor.get_fault_status(GROUP)
    assert status.local_ranks == [9]
    assert status.is_fault
    assert status.restart_fault_process
    assert not status.is_unrecovered
    files.processor.update_fault_info()
    assert not files.processor.get_fault_status(GROUP).is_fault  # It has been handled.


def test_fault_of_another_node_is_only_unrecovered(files: Files) -> None:
    files.reset([rank(1)])
    assert not files.processor.get_fault_status(GROUP).is_fault
    files.reset([rank(1, "unrecovered")])
    assert files.processor.get_fault_status(GROUP).is_unrecovered
    files.reset([rank(1, "recovered")])
    assert files.processor.get_fault_status([8, 9]).is_unrecovered


def test_new_retry_time_is_reported_once(files: Files) -> None:
    files.reset(RetryTime=1)
    assert files.processor.get_fault_status(GROUP).is_retried
    files.processor.update_fault_info()
    assert not files.processor.get_fault_status(GROUP).is_retried
    assert files.processor.get_remain_retry_time(3) == 2
    assert files.processor.get_remain_retry_time(0) == 0


def test_recovered_when_all_listed_ranks_are_recovered(files: Files) -> None:
    files.reset([rank(1, "recovered"), {"RankId": 2}])
    assert files.processor.is_recovered()
    files.reset([rank(1, "recovered"), rank(2, "unrecovered")])
    assert not files.processor.is_recovered()


@pytest.mark.parametrize(("table", "needed"), [(None, True), ("/a", True), ("", False)])
def test_rescheduled_pod_needs_a_new_rank_table(
    files: Files, monkeypatch: pytest.MonkeyPatch, table: str | None, needed: bool
) -> None:
    if table is None:
        monkeypatch.delenv("RANK_TABLE_FILE", raising=False)
    else:
        monkeypatch.setenv("RANK_TABLE_FILE", table)
    files.version("4")
    files.reset([rank(1, "recovered")])
    files.restart_type("podReschedule")
    files.processor.rank_table_version = 4
    assert files.processor.is_recovered() is not needed
    files.version("5")
    assert files.processor.is_recovered()
    assert files.processor.rank_table_version == (5 if needed else 4), "the next needs a newer one"
    files.version("four")
    assert files.processor.read_rank_table_version() == -1
    files.restart_type("hotReset")
    assert files.processor.is_recovered()


def test_workers_start_when_files_are_complete_and_list_no_local_fault(files: Files) -> None:
    files.reset(FaultFlushing=True)
    assert not files.processor.wait_to_start(GROUP)
    files.reset([rank(8)])
    assert not files.processor.wait_to_start(GROUP)
    files.reset([rank(1), rank(8, "recovered")], RetryTime=2)
    assert files.processor.wait_to_start(GROUP)
    assert files.processor.pre_retry_time == 2


def test_default_paths_are_the_documented_ones() -> None:
    processor = fault_check.fault_processor
    assert processor.reset_cm_path == "/user/restore/reset/config/reset.json"
    assert processor.restart_type_path == "/user/restore/reset/config/restartType"
    assert processor.rank_version_path == "/user/serverid/devindex/config/version"


# Ending processes

STUBBORN = (
    "import signal, sys\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('ready', flush=True)\n"
    "signal.pause()\n"
)
OBEDIENT = "import signal\nprint('ready', flush=True)\nsignal.pause()\n"


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_sigterm_ends_a_process(start: Any) -> None:
    process = start(OBEDIENT)
    assert not fault_check.all_pid_stopped({0: process.pid})
    fault_check.grace_exit_pids({0: process.pid, 1: 2**22 + 1, 2: -1, 3: 0})
    fault_check.stop_pids({0: process.pid})
    assert fault_check.all_pid_stopped(
        [process.pid]
    )  # A zombie: it has ended but is not reaped yet.
    assert process.wait(WAIT_S) == -signal.SIGTERM
    assert fault_check.all_pid_stopped([process.pid])


def test_stop_pids_kills_a_process_that_ignores_sigterm(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "GRACE_TIME_OUT", 0.2)
    process = start(STUBBORN)
    fault_check.grace_exit_pids({0: process.pid})
    fault_check.stop_pids([process.pid])
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_waiting_for_exits_has_a_deadline(start: Any) -> None:
    process = start(STUBBORN)
    assert reset_files.wait_for_exits([process.pid], 0.05) is False
    fault_check.force_exit_pids([process.pid])
    assert reset_files.wait_for_exits([process.pid, -1], WAIT_S) is True


def test_grace_exit_requires_a_dict() -> None:
    with pytest.raises(ValueError, match="dict"):
        fault_check.grace_exit_pids([os.getpid()])  # type: ignore[arg-type]


def test_torch_extension_cache_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "torch_extensions"
    (cache / "x").mkdir(parents=True)
    monkeypatch.setattr(reset_files, "TORCH_EXTENSIONS_CACHE_DIR", str(cache))
    fault_check.clean_before_restart()
    assert not cache.exists()
    fault_check.clean_before_restart()
