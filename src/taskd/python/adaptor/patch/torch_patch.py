"""Documented import path of the patches of torchrun."""

from taskd.ascend.documented.torchrun_patch import (
    context_wait_task,
    get_use_agent_store,
    get_worker_env,
    patch_create_c10d_store_decorator,
    patch_default_signal,
    patch_invoke_run,
    patch_launch_agent,
    patch_monitor_workers,
    patch_restart_workers,
    patch_start_workers,
    patch_stop_workers,
    patch_torch_method,
    start_processes_with_log_dir,
    start_processes_with_logs_spec,
    stop_worker_task,
)

__all__ = [
    "context_wait_task",
    "get_use_agent_store",
    "get_worker_env",
    "patch_create_c10d_store_decorator",
    "patch_default_signal",
    "patch_invoke_run",
    "patch_launch_agent",
    "patch_monitor_workers",
    "patch_restart_workers",
    "patch_start_workers",
    "patch_stop_workers",
    "patch_torch_method",
    "start_processes_with_log_dir",
    "start_processes_with_logs_spec",
    "stop_worker_task",
]
