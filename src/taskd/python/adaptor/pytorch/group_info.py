"""Documented import path of `taskd.ascend.documented.group_info`."""

from taskd.ascend.documented.group_info import (
    HCCL,
    dump_group_info,
    get_group_info,
    get_save_path,
)

__all__ = [
    "HCCL",
    "dump_group_info",
    "get_group_info",
    "get_save_path",
]
