"""The file to which a forked worker writes the stacks of its threads, each time it is asked.

The worker reacts to STACK_SIGNAL twice: faulthandler writes the stack of the main thread at once,
whatever the process is doing; and Python's own signal handler, which can run only between two
bytecodes, appends a line and the stacks of the other threads. If that line is late or missing, the
process was inside a native call. `process_activity.py` draws the conclusions.

faulthandler must not write the other threads: they run meanwhile, and reading a frame that is being
made crashes the process (once in a thousand signals if another thread runs Python).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.runtime.clock import file_time

MOST_CALLS = 100
"""Of one thread; faulthandler writes as many."""
PROMPT_S = 0.001
"""Two bytecodes follow each other much faster; a native call that does real work takes longer. The
delay is measured in ticks of the kernel's clock, which are 1 to 10 ms long."""
_PYTHON_RUNS = "taskd: Python runs, {:.6f} s later\n"
_LATER = re.compile(r"^taskd: Python runs, ([\d.]+) s later$", re.MULTILINE)
_MAIN_STACK = re.compile(r"^Stack \(most recent call first\):\n((?:  [^\n]*\n)*)", re.MULTILINE)


def install(path: str) -> None:
    """Install the handlers for STACK_SIGNAL. Call it in the worker's main thread."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the process lives

    def on_signal(signum: int, frame: object) -> None:
        with suppress(OSError):
            stacks_written_at = os.fstat(file.fileno()).st_mtime
            later_s = max(0.0, file_time() - stacks_written_at)
            file.write(_PYTHON_RUNS.format(later_s).encode() + _other_stacks())

    signal.signal(STACK_SIGNAL, on_signal)
    faulthandler.register(STACK_SIGNAL, file, all_threads=False, chain=True)
    # Without a handler, the signal would kill an interpreter that is exiting.
    atexit.register(_ignore_signal)


def _other_stacks() -> bytes:
    """In the form of faulthandler."""
    lines = []
    for thread, frame in sys._current_frames().items():
        if thread != threading.get_ident():
            lines.append(f"Thread {thread:#018x} (most recent call first):")
            lines += [
                f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}'
                for one, line in islice(traceback.walk_stack(frame), MOST_CALLS)
            ]
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def _ignore_signal() -> None:
    faulthandler.unregister(STACK_SIGNAL)
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class StackDump:
    text: str
    """All that was written."""
    main_stack: str
    """The stack of the thread that got the signal, which is the main thread."""
    in_python: bool
    """Whether the main thread was between two bytecodes, not inside a native call."""


class StackFile:
    """The reader's end of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._text = ""

    def read(self) -> StackDump | None:
        """The dump that was written since the last one that was read; None: nothing yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                raw = file.read()
        except OSError:
            return None
        self._offset += len(raw)
        self._text += raw.decode(errors="replace")
        found = _MAIN_STACK.search(self._text)
        if found is None:
            return None
        text, self._text = self._text, ""
        later = _LATER.search(text, found.end())
        return StackDump(text, found[1], later is not None and float(later[1]) <= PROMPT_S)
