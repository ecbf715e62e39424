"""`run_log`, the logger of TaskD. Importing it creates nothing and never raises."""

from taskd.ascend.toolkit.run_log import run_log

__all__ = ["run_log"]
