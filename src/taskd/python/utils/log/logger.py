"""Documented import path of the log."""

from taskd.ascend.documented.run_log import (
    CustomRotatingHandler,
    LogConfig,
    MaxLengthFormatter,
    run_log,
)

__all__ = ["CustomRotatingHandler", "LogConfig", "MaxLengthFormatter", "run_log"]
