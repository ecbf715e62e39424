"""Documented import path of `taskd.ascend.msrun.fault_check`."""

from taskd.ascend.msrun.fault_check import (
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
