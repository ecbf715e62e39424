"""Reads files that other programs write, while they may be writing them."""

from __future__ import annotations

import os
import stat

from taskd.python.toolkit.constants.constants import MAX_FILE_SIZE
from taskd.python.utils.log import run_log


def safe_get_file_info(path: str) -> str:
    """The text of a file, or an empty text if it is missing, a link, no file or above 1 MiB."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, TypeError, ValueError) as error:
        run_log.debug("%s is not read: %s", path, error)
        return ""
    with open(descriptor, "rb") as file:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode) or there.st_size > MAX_FILE_SIZE:
            run_log.warning("%s is not read: it is no file, or too large", path)
            return ""
        content = file.read(MAX_FILE_SIZE + 1)
    try:
        return content.decode() if len(content) <= MAX_FILE_SIZE else ""
    except UnicodeDecodeError as error:
        run_log.warning("%s is not read: %s", path, error)
        return ""
