"""Documented import path of `taskd.ascend.elastic_agent.elastic_log`."""

from taskd.ascend.elastic_agent.elastic_log import (
    BACKUP_MODE,
    BACKUPS,
    DIRECTORY,
    FILE_LIMIT_BYTES,
    FORMAT,
    LINE_LIMIT,
    OwnFile,
    run_log,
)

__all__ = [
    "BACKUPS",
    "BACKUP_MODE",
    "DIRECTORY",
    "FILE_LIMIT_BYTES",
    "FORMAT",
    "LINE_LIMIT",
    "OwnFile",
    "run_log",
]
