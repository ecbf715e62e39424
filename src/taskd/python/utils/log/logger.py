"""Documented import path of `taskd.ascend.toolkit.run_log`."""

from taskd.ascend.toolkit.run_log import (
    CustomRotatingHandler,
    LogConfig,
    MaxLengthFormatter,
    run_log,
)

__all__ = [
    "CustomRotatingHandler",
    "LogConfig",
    "MaxLengthFormatter",
    "run_log",
]
