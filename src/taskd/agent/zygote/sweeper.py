"""Removes a run's folders when launcher and zygote die together, while the zygote still imports.

Until the imports are done the kernel ends the zygote with its launcher (`zygote.py`), so that
neither can clean up. A small process, forked before anything is imported, waits for just that.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
from collections.abc import Callable

from taskd.agent import linux

LAST_BREATH_S = 1.0
"""The launcher may be dying still when the zygote has died of it."""


def post(folders: tuple[str, ...], launcher: int, close: int) -> Callable[[], None]:
    """Post the process; the answer dismisses it. `close`: a file that it must not keep open."""
    watched = os.pidfd_open(launcher)
    life, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        os.close(close)
        _wait(folders, life, watched)
        os._exit(0)
    os.close(life)
    os.close(watched)

    def dismiss() -> None:
        os.write(held, b"!")
        os.close(held)
        os.waitpid(pid, 0)

    return dismiss


def _wait(folders: tuple[str, ...], life: int, launcher: int) -> None:
    linux.name_process("taskd:sweeper")
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if os.read(life, 1):
        return  # dismissed
    if select.select([launcher], [], [], LAST_BREATH_S)[0]:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
