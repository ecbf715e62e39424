"""Documented import path of the Elastic Agent's `DLRecoverManager`."""

from mindx_elastic import pb
from taskd.ascend.documented.elastic_agent import (
    DLRecoverManager,
    init_grpc_recover_manager,
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
