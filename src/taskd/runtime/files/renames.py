"""Renames that lose nothing when other processes write the same file: Linux's renameat2."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
MISSING = (errno.EINVAL, errno.ENOSYS)
"""The file system, or the C library, does not have it."""


def exchange(one: Path, other: Path) -> None:
    """Each gets the other's content, at one moment. FileNotFoundError: one of them is missing."""
    _rename(one, other, RENAME_EXCHANGE)


def rename_to_new(source: Path, target: Path) -> None:
    """FileExistsError instead of replacing another file."""
    _rename(source, target, RENAME_NOREPLACE)


def _rename(source: Path, target: Path, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(target))
    names = os.fsencode(source), os.fsencode(target)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(target))
