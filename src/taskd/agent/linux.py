"""The few Linux calls that Python does not offer, for processes that must not be left behind."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """When the parent's thread that made us ends, the kernel sends us this signal; 0: it does not.

    Nothing tells us of a parent that died before this call: compare `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children, so that they can be found and ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """What `top` shows, at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def children() -> list[int]:
    """The pids of our children, zombies included."""
    pid = os.getpid()
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
