"""The log of the Elastic Agent: the logger `logRun`, whose lines go to `run.log`.

Importing this touches no file; the first line does.
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
    """Only what belongs to this user or group is written: others may read what they own."""

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        for there in (path.parent, path):
            if there.exists():
                owner = there.stat()
                if owner.st_uid != os.geteuid() and owner.st_gid != os.getegid():
                    raise PermissionError(EPERM, "it belongs to another user and group", str(there))
        return super()._open()


def _attach() -> logging.Logger:
    """What TaskD says underneath goes there, too, where somebody has named the directory."""
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
