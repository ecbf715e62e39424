"""Reads files that other programs write, for callers that want no exceptions."""

from __future__ import annotations

from taskd.ascend.toolkit.run_log import run_log
from taskd.runtime import small_file


def safe_get_file_info(path: str) -> str:
    """The text of a file, or an empty text if it is missing, a link, no file or above 1 MiB."""
    try:
        return small_file.read(path).decode()
    except (OSError, TypeError, ValueError) as error:
        run_log.debug("%s is not read: %s", path, error)
        return ""
