"""Folders and files that other users or programs may tamper with: private folders, small files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from taskd.errors import SettingsError

SHARED = Path("/tmp")
LIMIT_BYTES = 1024 * 1024


def user_folder() -> Path:
    """The default folder for this user's files."""
    return SHARED / f"taskd-{os.getuid()}"


def make_private(path: Path) -> Path:
    """Create the folder if needed. SettingsError: another user could have put files there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise SettingsError([f"{path} cannot be used: {error}"]) from error
    mine = found.st_uid == os.getuid() and not found.st_mode & 0o022
    if not stat.S_ISDIR(found.st_mode) or not mine:
        raise SettingsError([f"{path} must be a directory that only you can write"])
    return path


def read_small(path: str, limit: int = LIMIT_BYTES) -> bytes:
    """The content. OSError: missing, a symbolic link, not a regular file, or too large.

    Links are refused because any user who may write into the directory could point one at any file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not block
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        content = b""
        while len(content) <= limit and (more := os.read(descriptor, limit + 1 - len(content))):
            content += more
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content
