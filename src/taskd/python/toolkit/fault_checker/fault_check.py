"""Documented import path of the reset files and the functions that end processes."""

from taskd.ascend.documented.reset_files import (
    FaultProcessor,
    FaultStatus,
    ResetCmData,
    all_pid_stopped,
    clean_before_restart,
    fault_processor,
    force_exit_pids,
    grace_exit_pids,
    stop_pids,
)

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
