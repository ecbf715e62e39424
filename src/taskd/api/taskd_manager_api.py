"""Documented import path of `taskd.ascend.documented.init_manager`."""

from taskd.ascend.documented.init_manager import (
    COUNTS,
    TEXTS,
    init_taskd_manager,
    start_taskd_manager,
)

__all__ = [
    "COUNTS",
    "TEXTS",
    "init_taskd_manager",
    "start_taskd_manager",
]
