"""`run_log`, the logger of TaskD. Importing it creates nothing and never raises."""

from taskd.python.utils.log.logger import run_log

__all__ = ["run_log"]
