"""Documented import path of the worker functions of `taskd.api`."""

from taskd.ascend.documented.api_functions import (
    destroy_taskd_worker,
    init_taskd_worker,
    start_taskd_worker,
)

__all__ = ["destroy_taskd_worker", "init_taskd_worker", "start_taskd_worker"]
