"""Documented import path of `taskd.ascend.toolkit.ip`."""

from taskd.ascend.toolkit.ip import (
    pre_handle_ip,
)

__all__ = [
    "pre_handle_ip",
]
