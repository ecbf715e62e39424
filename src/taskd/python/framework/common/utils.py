"""Documented import path of two time limits."""

from taskd.ascend.documented.agent_base import get_hccl_switch_nic_timeout, get_report_fault_timeout

__all__ = ["get_hccl_switch_nic_timeout", "get_report_fault_timeout"]
