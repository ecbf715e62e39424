"""Documented import path of MindIO's controller in the manager's process."""

from taskd.ascend.documented.controller_functions import (
    ControllerMessage,
    backend_send_callback,
    init_controller,
    report_process_fault,
    report_recover_status,
    report_recover_strategy,
    report_stop_complete,
    send_msg_to_controller,
)

__all__ = [
    "ControllerMessage",
    "backend_send_callback",
    "init_controller",
    "report_process_fault",
    "report_recover_status",
    "report_recover_strategy",
    "report_stop_complete",
    "send_msg_to_controller",
]
