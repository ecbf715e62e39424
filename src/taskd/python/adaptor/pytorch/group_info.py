"""Documented import path of the dump of process groups."""

from taskd.ascend.documented.group_dump import dump_group_info, get_group_info, get_save_path

__all__ = ["dump_group_info", "get_group_info", "get_save_path"]
