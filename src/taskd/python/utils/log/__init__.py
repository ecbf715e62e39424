"""Documented import path of `run_log`, TaskD's logger. The import creates no file."""

from taskd.ascend.documented.run_log import run_log

__all__ = ["run_log"]
