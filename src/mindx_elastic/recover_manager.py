"""Documented import path of `taskd.ascend.elastic_agent.elastic_recover_manager`."""

from taskd.ascend.elastic_agent.elastic_recover_manager import (
    DLRecoverManager,
    init_grpc_recover_manager,
    pb,
    report_process_fault,
    report_recover_status,
    report_recover_strategy,
    report_stop_complete,
)

__all__ = [
    "DLRecoverManager",
    "init_grpc_recover_manager",
    "pb",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]
