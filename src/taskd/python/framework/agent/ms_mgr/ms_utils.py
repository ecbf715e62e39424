"""Documented import path of the functions about MindSpore's ranks."""

from taskd.ascend.documented.msrun_reset_plugin import (
    calculate_global_rank,
    calculate_local_rank_by_global_rank,
    check_monitor_res_valid,
)

__all__ = [
    "calculate_global_rank",
    "calculate_local_rank_by_global_rank",
    "check_monitor_res_valid",
]
