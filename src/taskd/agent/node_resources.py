"""What a node needs before anything slow is imported: its folders, its zygote, its store's address.

The folder in shared memory is where the node's ranks publish their progress and keep their
snapshots. The launcher that made it removes it; if the launcher has died, the zygote does
(`zygote/zygote.py`). If all of them are killed at once, gigabytes of snapshots would stay in memory
forever. Therefore each folder is locked for as long as its launcher lives, and the next launcher
on this machine removes the folders that no process has locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.agent.run.plan import Plan
from taskd.agent.worker_environment import base_environment
from taskd.agent.zygote import folder_sweeper
from taskd.agent.zygote.worker_processes import WorkerProcesses
from taskd.runtime.clock import wall

SHARED_MEMORY = "/dev/shm"
PREFIX = "taskd-node-"
YOUNG_S = 60.0
"""A younger folder is never removed: its launcher may not have locked it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeResources:
    """What `NodeRun` builds on: addresses that are known, and processes that are warming up."""

    processes: WorkerProcesses
    run_dir: str
    beacons: str
    """The folder in shared memory."""
    store: str
    """host:port of the torch store where the ranks meet at the first start."""
    listener: socket.socket | None = None
    """The listening socket of the store that this node has to serve, if any."""
    served_store: str = ""
    """host:port of the store that dies with this node; empty: none does."""


def worker_processes(plan: Plan, folders: tuple[str, str]) -> WorkerProcesses:
    """The node's zygote and workers, not started yet."""
    return WorkerProcesses(
        plan.program,
        preload=() if plan.spawn else plan.preload,
        spawn=plan.spawn,
        remove=folders,
        env=base_environment(plan),
    )


@contextmanager
def run_folders() -> Iterator[tuple[str, str]]:
    """A temporary folder and a folder in shared memory; both are removed at the end."""
    folders = tempfile.mkdtemp(prefix="taskd-"), make_shared_folder()
    try:
        yield folders
    finally:
        folder_sweeper.remove(folders)


def make_shared_folder(where: str = SHARED_MEMORY) -> str:
    """In a temporary folder if the machine has no shared memory. The caller removes it."""
    if not os.access(where, os.W_OK):
        where = tempfile.gettempdir()
    for path in _old_folders(Path(where)):
        _remove_if_unlocked(path)
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=where)
    # Locked until this process ends, however it ends; not inherited by programs that it starts.
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return folder


def _old_folders(where: Path) -> Iterator[Path]:
    for path in where.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):
            status = path.lstat()
            mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if mine and wall() - status.st_mtime > YOUNG_S:
                yield path


def _remove_if_unlocked(path: Path) -> None:
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # another launcher has removed it
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)
