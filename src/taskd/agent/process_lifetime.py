"""Linux calls that tie the lifetimes of processes together, so that none is left behind.

Run as a program, it starts a Python module or another program in a process that the kernel kills
with its parent:

    python -m taskd.agent.process_lifetime PARENT_PID MODULE [ARGUMENT ...]
    python process_lifetime.py PARENT_PID --exec PROGRAM [ARGUMENT ...]
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
EXEC = "--exec"
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send us this signal when the parent's thread that created us ends.

    0 cancels the request. The kernel sends nothing if the parent died before this call: compare
    `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, int(signum))


def adopt_orphans() -> None:
    """Descendants whose parent dies become our children, so that we can find and kill them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `top` shows: at most 15 characters."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def children() -> list[int]:
    """The pids of our children, zombies included."""
    pid = os.getpid()
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def end_session(leader: int) -> None:
    """Kill and reap our children of this session: what a process has left that was our child."""
    for pid in children():
        with suppress(ProcessLookupError, PermissionError, ChildProcessError):
            if os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def kill_guarded(guarded: Mapping[int, int]) -> None:
    """Kill these processes, with their groups: the pid of each, and a pidfd that proves it."""
    for pid, pidfd in guarded.items():
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGSTOP)  # raises if the pid is free by now
            os.killpg(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def command_with_parent(module: str, *arguments: str) -> list[str]:
    """The command line that runs this module in a process that dies with the current one."""
    return [sys.executable, "-m", __name__, str(os.getpid()), module, *arguments]


def program_with_parent(program: str, *arguments: str) -> list[str]:
    """The same for a program that is not Python. TaskD itself is not imported: it starts sooner."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), EXEC, program, *arguments]


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    is_program = command[0] == EXEC
    name, *arguments = command[1:] if is_program else command
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(f"{name}: not started, because its parent (pid {parent}) has already exited")
    sys.argv = [name, *arguments]
    if is_program:
        os.execv(name, sys.argv)  # the kernel keeps the tie
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


if __name__ == "__main__":
    main()
