"""What the cluster says about faults in the reset files.

Ascend's device plugin writes `reset.json`, `restartType` and the version of the rank table into
the job's pods. Agents without a manager (MSRunPlugin, the Elastic Agent) read them here, and end
processes with what `endings.py` offers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from taskd.ascend.msrun.process_exits import (
    all_pid_stopped,
    clean_before_restart,
    force_exit_pids,
    grace_exit_pids,
    stop_pids,
)
from taskd.ascend.toolkit import constants
from taskd.ascend.toolkit.file_process import safe_get_file_info
from taskd.ascend.toolkit.run_log import run_log
from taskd.config import environ

__all__ = [
    "FaultProcessor",
    "FaultStatus",
    "ResetCmData",
    "all_pid_stopped",
    "clean_before_restart",
    "fault_processor",
    "force_exit_pids",
    "grace_exit_pids",
    "stop_pids",
]


@dataclass
class FaultStatus:
    """What the reset files mean for the ranks of this node."""

    local_ranks: list[int] = field(default_factory=list)
    is_fault: bool = False
    is_unrecovered: bool = False
    is_retried: bool = False
    restart_fault_process: bool = False


@dataclass
class ResetCmData:
    """What the reset files say."""

    fault_ranks: list[dict[str, Any]] = field(default_factory=list)
    retry_time: int = 0
    grace_exit: int = 0
    restart_type: str = ""
    fault_flush: bool = False
    restart_fault_process: bool = False


class FaultProcessor:
    """Compares what the files say now with what was dealt with before."""

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
        """Read the files; what is missing or of a wrong type counts as not said."""
        told = _json_object(safe_get_file_info(self.reset_cm_path))
        ranks = _typed(told, constants.KEY_RANK_LIST, list, [])
        return ResetCmData(
            fault_ranks=sorted((rank for rank in ranks if _has_number(rank)), key=_number),
            retry_time=_typed(told, constants.KEY_RETRY_TIME, int, 0),
            grace_exit=_typed(told, constants.KEY_GRACE_EXIT, int, 0),
            restart_type=safe_get_file_info(self.restart_type_path).strip(),
            fault_flush=_typed(told, constants.KEY_FAULT_FLUSH, bool, False),
            restart_fault_process=_typed(told, constants.KEY_RESTART_FAULT_PROCESS, bool, False),
        )

    def _update_reset_info(self) -> None:
        _warn_of_watchdog()
        told = self.get_reset_info_from_cm()
        self.fault_ranks = told.fault_ranks
        self.retry_time = told.retry_time
        self.grace_exit = told.grace_exit
        self.restart_type = told.restart_type
        self.fault_flush = told.fault_flush
        self.restart_fault_process = told.restart_fault_process

    def get_fault_status(self, worker_group: Any) -> FaultStatus:
        """Read the files, and say what they mean for the ranks of this group."""
        self._update_reset_info()
        local = _global_ranks(worker_group)
        faulty = [
            _number(rank)
            for rank in self.fault_ranks
            if _number(rank) in local and _is(rank, constants.VALUE_FAULT)
        ]
        open_ = (constants.VALUE_UNRECOVERED, constants.VALUE_RECOVERED)
        return FaultStatus(
            local_ranks=faulty,
            is_fault=bool(faulty) and self.fault_ranks != self.pre_fault_ranks,
            is_unrecovered=any(_is(rank, *open_) for rank in self.fault_ranks),
            is_retried=self.retry_time != self.pre_retry_time,
            restart_fault_process=self.restart_fault_process,
        )

    def is_recovered(self) -> bool:
        """Whether every rank that the files list is well again, and the new rank table is there."""
        self._update_reset_info()
        stated = [rank for rank in self.fault_ranks if constants.KEY_STATUS in rank]
        if not all(_is(rank, constants.VALUE_RECOVERED) for rank in stated):
            return False
        return self._has_new_rank_table()

    def _has_new_rank_table(self) -> bool:
        wanted = (
            environ.get(constants.ENABLE_RANKTABLE_ENV) != ""
            and os.path.exists(self.rank_version_path)
            and self.restart_type == constants.VALUE_RESTART_RESCHEDULE_TYPE
        )
        return not wanted or self.read_rank_table_version() > self.rank_table_version

    def wait_to_start(self, worker_group: Any) -> bool:
        """Whether workers may start now: no fault is being written down, none is of this node."""
        self._update_reset_info()
        if self.fault_flush:
            run_log.debug("faults are still being written down")
            return False
        local = _global_ranks(worker_group)
        faulty = [rank for rank in self.fault_ranks if _is(rank, constants.VALUE_FAULT)]
        if any(_number(rank) in local for rank in faulty):
            return False
        self.update_fault_info()
        return True

    def update_fault_info(self) -> None:
        """What the files say now has been dealt with."""
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
        run_log.warning("%s is on: HCCL may end a process before it can be repaired", name)


def _json_object(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text) if text else {}
    except ValueError as error:
        run_log.warning("the reset file is no JSON: %s", error)
        return {}
    return told if isinstance(told, dict) else {}


def _typed(told: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    value = told.get(key, default)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    return value if fits else default


def _has_number(rank: Any) -> bool:
    return isinstance(rank, dict) and type(rank.get(constants.KEY_RANK_ID)) is int


def _number(rank: Mapping[str, Any]) -> int:
    return int(rank[constants.KEY_RANK_ID])


def _is(rank: Mapping[str, Any], *states: str) -> bool:
    return rank.get(constants.KEY_STATUS) in states


def _global_ranks(worker_group: Any) -> set[int]:
    """Of torch's worker group, or of plain numbers."""
    workers = getattr(worker_group, "workers", worker_group)
    return {getattr(worker, "global_rank", worker) for worker in workers}


fault_processor = FaultProcessor()
