"""A folder that is this user's alone, also where anybody could have made one of that name first."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from taskd.errors import SettingsError

SHARED = Path("/tmp")


def place() -> Path:
    """Where this user's files are if nothing else is set."""
    return SHARED / f"taskd-{os.getuid()}"


def make(path: Path) -> Path:
    """Made if need be. Raises SettingsError if somebody else could have put files there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        there = path.lstat()
    except OSError as error:
        raise SettingsError([f"{path} cannot be used: {error}"]) from error
    mine = there.st_uid == os.getuid() and not there.st_mode & 0o022
    if not stat.S_ISDIR(there.st_mode) or not mine:
        raise SettingsError([f"{path} is not a directory that only you can write"])
    return path
