"""Two time limits that the environment may set."""

from __future__ import annotations

from taskd.ascend.recover_client import hccl_switch_nic_timeout
from taskd.ascend.toolkit.constants import MAX_REPORT_FAULT_TIMEOUT, MIN_REPORT_FAULT_TIMEOUT
from taskd.config import environ

NO_LIMIT = -1


def get_hccl_switch_nic_timeout() -> int:
    """How many seconds a pause for a link switch may last."""
    return hccl_switch_nic_timeout()


def get_report_fault_timeout() -> int:
    """How many seconds an agent waits for orders after it has reported a fault; -1: for ever."""
    text = environ.get("TASKD_REPORT_FAULT_TIMEOUT", "")
    if not text.isdecimal():
        return NO_LIMIT
    seconds = int(text)
    allowed = MIN_REPORT_FAULT_TIMEOUT <= seconds <= MAX_REPORT_FAULT_TIMEOUT
    return seconds if allowed else NO_LIMIT
