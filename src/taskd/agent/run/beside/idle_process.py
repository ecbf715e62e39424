"""Runs a module's `main` in a process that gives way to the ranks.

python -m taskd.agent.run.beside.idle_process MODULE [ARGUMENT ...]

It imports at the usual priority: at a lower one it would not be ready for minutes on a node whose
ranks use every core.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib import import_module

NICENESS = 10
"""About a tenth of a core beside a rank that uses one."""
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IDLE_CLASS = 3 << 13


def main() -> None:
    sys.argv = sys.argv[1:]
    module = import_module(sys.argv[0])
    os.nice(NICENESS)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IDLE_CLASS)  # if it fails: as others
    module.main()


if __name__ == "__main__":
    main()
