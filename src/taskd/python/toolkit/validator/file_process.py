"""Documented import path of `safe_get_file_info`."""

from taskd.ascend.documented.validators import safe_get_file_info

__all__ = ["safe_get_file_info"]
