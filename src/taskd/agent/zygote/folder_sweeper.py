"""Cleans up after a run if launcher and zygote die together while the zygote still imports.

Until its imports are done, the kernel kills the zygote together with its launcher (`zygote.py`), so
neither of them can clean up. A small process, forked before anything is imported, waits for this.
It kills the processes that a former zygote has left and removes the run's folders.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping

from taskd.agent import process_lifetime

LAUNCHER_EXIT_S = 1.0
"""The zygote dies with the launcher; the launcher itself may need this long to be gone."""


def start(
    folders: tuple[str, ...], guarded: Mapping[int, int], launcher: int, close: int
) -> Callable[[], None]:
    """Fork the sweeper; call the result to end it. `close`: a file that it must not keep open."""
    launcher_fd = os.pidfd_open(launcher)
    zygote_alive, held_open = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held_open)
        os.close(close)
        _wait(folders, guarded, zygote_alive, launcher_fd)
        os._exit(0)
    os.close(zygote_alive)
    os.close(launcher_fd)

    def stop() -> None:
        os.write(held_open, b"!")
        os.close(held_open)
        os.waitpid(pid, 0)

    return stop


def _wait(
    folders: tuple[str, ...], guarded: Mapping[int, int], zygote_alive: int, launcher_fd: int
) -> None:
    process_lifetime.name_process("taskd:sweeper")
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.read(zygote_alive, 1):
        return  # the zygote has stopped us
    if select.select([launcher_fd], [], [], LAUNCHER_EXIT_S)[0]:
        process_lifetime.kill_guarded(guarded)
        remove(folders)


def remove(folders: Iterable[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
