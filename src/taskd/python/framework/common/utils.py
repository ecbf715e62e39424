"""Documented import path of `taskd.ascend.documented.timeouts`."""

from taskd.ascend.documented.timeouts import (
    NO_LIMIT,
    get_hccl_switch_nic_timeout,
    get_report_fault_timeout,
)

__all__ = [
    "NO_LIMIT",
    "get_hccl_switch_nic_timeout",
    "get_report_fault_timeout",
]
