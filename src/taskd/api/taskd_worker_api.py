"""Documented import path of `taskd.ascend.documented.init_worker`."""

from taskd.ascend.documented.init_worker import (
    STEPS,
    WORKER,
    destroy_taskd_worker,
    init_taskd_worker,
    start_taskd_worker,
)

__all__ = [
    "STEPS",
    "WORKER",
    "destroy_taskd_worker",
    "init_taskd_worker",
    "start_taskd_worker",
]
