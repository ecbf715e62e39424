"""The documented names of the log, on top of `taskd.runtime.log`."""

from __future__ import annotations

import os

from taskd.runtime import log
from taskd.runtime.log import OneLineFormatter as MaxLengthFormatter
from taskd.runtime.log_file import DIRECTORY_MODE, FILE_MODE, RotatingHandler


class CustomRotatingHandler(RotatingHandler):
    """`RotatingHandler` with the parameter names of the standard library's handlers."""

    def __init__(
        self,
        filename: str | os.PathLike[str],
        maxBytes: int = 0,
        backupCount: int = 0,
        encoding: str | None = None,
        delay: bool | None = None,
    ) -> None:
        # `delay` is ignored: the first log line opens the file.
        super().__init__(filename, maxBytes, backupCount, encoding)


class LogConfig:
    """The log settings in the environment, read when this object is created."""

    LOG_FILE_NAME = "taskd.log"
    LOG_FORMAT = log.FORMAT
    LOG_DATE_FORMAT = log.DATE_FORMAT
    LOG_MAX_LINE_LENGTH = log.MESSAGE_LIMIT
    LOG_MAX_BYTES = log.FILE_LIMIT_BYTES
    LOG_BACKUP_COUNT = log.BACKUPS
    LOG_DIR_MODE = DIRECTORY_MODE
    LOG_FILE_MODE = FILE_MODE

    def __init__(self) -> None:
        settings, self.problems = log.settings()
        self.log_path = settings.log_path
        self.file_log_level = str(settings.file_log_level)
        self.std_log_level = str(settings.std_log_level)
        self.log_stdout = settings.log_stdout


run_log = log.attach()

__all__ = ["CustomRotatingHandler", "LogConfig", "MaxLengthFormatter", "run_log"]
