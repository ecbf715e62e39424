"""Documented import path of `MSRunPlugin`."""

from taskd.ascend.documented.msrun_reset_plugin import MSRunPlugin

__all__ = ["MSRunPlugin"]
