"""Documented import path of `taskd.ascend.toolkit.file_process`."""

from taskd.ascend.toolkit.file_process import (
    safe_get_file_info,
)

__all__ = [
    "safe_get_file_info",
]
