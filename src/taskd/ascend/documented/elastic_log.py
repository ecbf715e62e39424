"""The log of the Elastic Agent: the logger `logRun`, which writes to `run.log`.

Importing this module does not touch the file; the first log line creates it.
"""

from __future__ import annotations

import logging
import os
from errno import EPERM
from io import TextIOWrapper
from pathlib import Path

from taskd.config import environ
from taskd.runtime.log import ROOT, OneLineFormatter
from taskd.runtime.log_file import RotatingHandler

DIRECTORY = "/var/log/mindx-dl/elastic"
FORMAT = "[%(asctime)s][%(levelname)s][%(message)s]"
LINE_LIMIT = 1024
FILE_LIMIT_BYTES = 20 * 1024 * 1024
BACKUPS, BACKUP_MODE = 8, 0o400


class OwnFile(RotatingHandler):
    """Writes only if file and directory belong to this user or group."""

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        for each in (path.parent, path):
            if each.exists():
                owner = each.stat()
                if owner.st_uid != os.geteuid() and owner.st_gid != os.getegid():
                    raise PermissionError(EPERM, "it belongs to another user and group", str(each))
        return super()._open()


def _attach() -> logging.Logger:
    """If ELASTIC_LOG_PATH is set, TaskD's own log lines go to the file, too."""
    directory = environ.get("ELASTIC_LOG_PATH", "")
    handler = OwnFile(
        Path(directory or DIRECTORY) / "run.log",
        max_bytes=FILE_LIMIT_BYTES,
        backups=BACKUPS,
        backup_mode=BACKUP_MODE,
    )
    handler.setLevel(logging.INFO)
    handler.setFormatter(OneLineFormatter(FORMAT, LINE_LIMIT))
    logger = logging.getLogger("logRun")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    if directory:
        ROOT.addHandler(handler)
    return logger


run_log = _attach()
