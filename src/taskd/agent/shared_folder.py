"""The folder in shared memory where a node's ranks show their progress and keep their snapshots.

Whoever made it removes it, or the zygote does when that one has died (`agent/zygote/zygote.py`).
When all of them were killed at once, gigabytes of snapshots would stay in memory for good; so
each folder is locked for as long as its maker lives, and the next one here clears away what
nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from taskd.runtime.clock import wall

SHARED_MEMORY = "/dev/shm"
PREFIX = "taskd-node-"
YOUNG_S = 60.0
"""A folder is not judged before it had the time to be locked."""


def make_folder(where: str = SHARED_MEMORY) -> str:
    """The caller removes it. In memory if the machine has that."""
    if not os.access(where, os.W_OK):
        where = tempfile.gettempdir()
    for path in _ours(Path(where)):
        _remove_if_nobody_holds(path)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=where)
    # Held until this process ends, however it ends; never inherited by a program that it starts.
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def _ours(where: Path) -> Iterator[Path]:
    for path in where.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):
            there = path.lstat()
            mine = stat.S_ISDIR(there.st_mode) and there.st_uid == os.getuid()
            if mine and wall() - there.st_mtime > YOUNG_S:
                yield path


def _remove_if_nobody_holds(path: Path) -> None:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # somebody else was faster
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)
