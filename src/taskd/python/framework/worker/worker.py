"""Documented import path of `taskd.ascend.documented.worker_class`."""

from taskd.ascend.documented.worker_class import (
    StressStatus,
    Worker,
)

__all__ = [
    "StressStatus",
    "Worker",
]
