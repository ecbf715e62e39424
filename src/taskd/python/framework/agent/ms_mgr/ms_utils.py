"""Documented import path of `taskd.ascend.msrun.ms_utils`."""

from taskd.ascend.msrun.ms_utils import (
    calculate_global_rank,
    calculate_local_rank_by_global_rank,
    check_monitor_res_valid,
)

__all__ = [
    "calculate_global_rank",
    "calculate_local_rank_by_global_rank",
    "check_monitor_res_valid",
]
