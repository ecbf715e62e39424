"""Documented import path of `DLRecoverManager` and its functions."""

from taskd.ascend.documented.recover_functions import (
    CallBackFuncs,
    DLRecoverManager,
    RecoverManager,
    get_instance,
    get_recover_manager_instance,
    import_flag,
    init_grpc_client,
    init_grpc_process,
    init_grpc_recover_manager,
    init_mindio_controller,
    register_callback_func,
    report_process_fault,
    report_recover_status,
    report_recover_strategy,
    report_stop_complete,
)
from taskd.ascend.recover_client import ProtoBufData

__all__ = [
    "CallBackFuncs",
    "DLRecoverManager",
    "ProtoBufData",
    "RecoverManager",
    "get_instance",
    "get_recover_manager_instance",
    "import_flag",
    "init_grpc_client",
    "init_grpc_process",
    "init_grpc_recover_manager",
    "init_mindio_controller",
    "register_callback_func",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
]
