"""Faults that the cluster reports in the reset files, and functions that end processes.

Ascend's device plugin writes `reset.json`, `restartType` and the version of the rank table into
the job's pods. Agents without a manager (MSRunPlugin, the Elastic Agent) read these files here and
end their processes by pid, whether the processes are their children or not.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from taskd.ascend.documented import agent_constants as constants
from taskd.ascend.documented.run_log import run_log
from taskd.ascend.documented.validators import safe_get_file_info
from taskd.config import environ
from taskd.runtime.clock import monotonic
from taskd.wire.json_reading import loads

TORCH_EXTENSIONS_CACHE_DIR = os.path.join(os.path.expanduser("~"), ".cache", "torch_extensions")


@dataclass
class FaultStatus:
    """The meaning of the reset files for the ranks of this node."""

    local_ranks: list[int] = field(default_factory=list)
    is_fault: bool = False
    is_unrecovered: bool = False
    is_retried: bool = False
    restart_fault_process: bool = False


@dataclass
class ResetCmData:
    """The contents of the reset files."""

    fault_ranks: list[dict[str, Any]] = field(default_factory=list)
    retry_time: int = 0
    grace_exit: int = 0
    restart_type: str = ""
    fault_flush: bool = False
    restart_fault_process: bool = False


class FaultProcessor:
    """Compares the current contents of the files with what was handled before."""

    def __init__(self) -> None:
        self.reset_cm_path = constants.RESET_CONFIG_PATH
        self.restart_type_path = constants.RESTART_TYPE_PATH
        self.rank_version_path = constants.RANK_TABLE_VERSION_PATH
        self.fault_ranks: list[dict[str, Any]] = []
        self.pre_fault_ranks: list[dict[str, Any]] = []
        self.retry_time = 0
        self.pre_retry_time = 0
        self.grace_exit = 0
        self.restart_type = ""
        self.fault_flush = False
        self.restart_fault_process = False
        self.rank_table_version = -1

    def get_reset_info_from_cm(self) -> ResetCmData:
        """Read the files. A missing value or one of a wrong type gets its default."""
        values = _json_object(safe_get_file_info(self.reset_cm_path))
        ranks = _typed(values, constants.KEY_RANK_LIST, list, [])
        return ResetCmData(
            fault_ranks=sorted((rank for rank in ranks if _has_number(rank)), key=_number),
            retry_time=_typed(values, constants.KEY_RETRY_TIME, int, 0),
            grace_exit=_typed(values, constants.KEY_GRACE_EXIT, int, 0),
            restart_type=safe_get_file_info(self.restart_type_path).strip(),
            fault_flush=_typed(values, constants.KEY_FAULT_FLUSH, bool, False),
            restart_fault_process=_typed(values, constants.KEY_RESTART_FAULT_PROCESS, bool, False),
        )

    def _update_reset_info(self) -> None:
        _warn_of_watchdog()
        read = self.get_reset_info_from_cm()
        self.fault_ranks = read.fault_ranks
        self.retry_time = read.retry_time
        self.grace_exit = read.grace_exit
        self.restart_type = read.restart_type
        self.fault_flush = read.fault_flush
        self.restart_fault_process = read.restart_fault_process

    def get_fault_status(self, worker_group: Any) -> FaultStatus:
        """Read the files and evaluate them for the ranks of this group."""
        self._update_reset_info()
        local = _global_ranks(worker_group)
        faulty = [
            _number(rank)
            for rank in self.fault_ranks
            if _number(rank) in local and _is(rank, constants.VALUE_FAULT)
        ]
        pending = (constants.VALUE_UNRECOVERED, constants.VALUE_RECOVERED)
        return FaultStatus(
            local_ranks=faulty,
            is_fault=bool(faulty) and self.fault_ranks != self.pre_fault_ranks,
            is_unrecovered=any(_is(rank, *pending) for rank in self.fault_ranks),
            is_retried=self.retry_time != self.pre_retry_time,
            restart_fault_process=self.restart_fault_process,
        )

    def is_recovered(self) -> bool:
        """Whether all listed ranks have recovered, and a new rank table, if needed, is present.

        If so, the version of that rank table counts as used: the next fault needs a newer one.
        """
        recovered = self.has_recovered()
        if recovered and self._needs_rank_table():
            self.rank_table_version = self.read_rank_table_version()
        return recovered

    def has_recovered(self) -> bool:
        """The same, without using up the rank table."""
        self._update_reset_info()
        listed = [rank for rank in self.fault_ranks if constants.KEY_STATUS in rank]
        if not all(_is(rank, constants.VALUE_RECOVERED) for rank in listed):
            return False
        new = self.read_rank_table_version() > self.rank_table_version
        return new or not self._needs_rank_table()

    def _needs_rank_table(self) -> bool:
        return (
            environ.get(constants.ENABLE_RANKTABLE_ENV) != ""
            and os.path.exists(self.rank_version_path)
            and self.restart_type == constants.VALUE_RESTART_RESCHEDULE_TYPE
        )

    def wait_to_start(self, worker_group: Any) -> bool:
        """Whether workers may start: the files are complete and list no fault of this node."""
        self._update_reset_info()
        if self.fault_flush:
            run_log.debug("the workers do not start yet: the reset files are still being written")
            return False
        local = _global_ranks(worker_group)
        faulty = [rank for rank in self.fault_ranks if _is(rank, constants.VALUE_FAULT)]
        if any(_number(rank) in local for rank in faulty):
            return False
        self.update_fault_info()
        return True

    def update_fault_info(self) -> None:
        """Remember the current contents of the files as handled."""
        self.pre_fault_ranks = self.fault_ranks
        self.pre_retry_time = self.retry_time
        self.rank_table_version = self.read_rank_table_version()

    def read_rank_table_version(self) -> int:
        text = safe_get_file_info(self.rank_version_path).strip()
        return int(text) if text.isascii() and text.isdigit() else -1

    def get_remain_retry_time(self, max_retry_time: int) -> int:
        return max(0, max_retry_time - self.retry_time)


@cache
def _warn_of_watchdog() -> None:
    if environ.get(constants.WATCHDOG_ENV, constants.WATCHDOG_ON) == constants.WATCHDOG_ON:
        name = constants.WATCHDOG_ENV
        run_log.warning("%s is on: HCCL may end a process before it is repaired", name)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = loads(text) if text else {}
    except ValueError as error:
        run_log.warning("the reset file is ignored: it is not valid JSON: %s", error)
        return {}
    return value if isinstance(value, dict) else {}


def _typed(values: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = values.get(key, default)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if fits else default


def _has_number(rank: Any) -> bool:
    return isinstance(rank, dict) and type(rank.get(constants.KEY_RANK_ID)) is int


def _number(rank: Mapping[str, Any]) -> int:
    return int(rank[constants.KEY_RANK_ID])


def _is(rank: Mapping[str, Any], *states: str) -> bool:
    return rank.get(constants.KEY_STATUS) in states


def _global_ranks(worker_group: Any) -> set[int]:
    """The ranks of torch's worker group, or of a list of numbers."""
    workers = getattr(worker_group, "workers", worker_group)
    return {getattr(worker, "global_rank", worker) for worker in workers}


fault_processor = FaultProcessor()


# Ending processes


def clean_before_restart() -> None:
    """Remove torch's cache of compiled extensions: a killed compiler leaves its lock there."""
    shutil.rmtree(TORCH_EXTENSIONS_CACHE_DIR, ignore_errors=True)


def grace_exit_pids(pids: Mapping[Any, int]) -> None:
    """Send SIGTERM to these processes."""
    if not isinstance(pids, Mapping):
        raise ValueError(f"pids must be a dict, got {type(pids).__name__}")  # noqa: TRY004
    _signal(pids.values(), signal.SIGTERM)


def force_exit_pids(pids: Mapping[Any, int] | Iterable[int]) -> None:
    """Send SIGKILL to these processes."""
    _signal(_numbers(pids), signal.SIGKILL)


def all_pid_stopped(pids: Mapping[Any, int] | Iterable[int]) -> bool:
    return not any(_is_running(pid) for pid in _numbers(pids))


def stop_pids(pids: Mapping[Any, int] | Iterable[int]) -> None:
    """Wait up to 10 minutes for these processes to end, then kill the rest."""
    wait_for_exits(_numbers(pids), constants.GRACE_TIME_OUT)
    force_exit_pids(pids)


def wait_for_exits(pids: Iterable[int], timeout_s: float) -> bool:
    """Whether all of them have ended in time. Works for processes that are not our children, and
    without polling: the kernel reports each exit through a pidfd."""
    deadline = monotonic() + timeout_s
    waiting = select.poll()
    handles = set()
    try:
        for pid in filter(_is_running, pids):
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            handles.add(handle)
            waiting.register(handle, select.POLLIN)
        left = set(handles)
        while left:
            remaining_s = deadline - monotonic()
            if remaining_s <= 0:
                return False
            for handle, _ in waiting.poll(remaining_s * 1000):
                waiting.unregister(handle)
                left.discard(handle)
        return True
    finally:
        for handle in handles:
            os.close(handle)


def _is_running(pid: int) -> bool:
    """False for a zombie, too: it has ended, although its parent has not reaped it."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return line.rpartition(")")[2].split()[0] not in "ZX"


def _numbers(pids: Mapping[Any, int] | Iterable[int]) -> list[int]:
    return list(pids.values() if isinstance(pids, Mapping) else pids)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        if not Path(f"/proc/{pid}").exists():  # Also skips 0 and -1, which address many processes.
            continue
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            run_log.warning("process %d ended before it was sent %s", pid, number.name)
