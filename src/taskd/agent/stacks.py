"""The file in which a forked worker writes where its threads stand, each time it is asked.

The worker answers STACK_SIGNAL twice: faulthandler writes the stacks at once, wherever the process
is; and Python's own handler adds a line, which it can do only between two bytecodes. If that line
is late, or missing, the process was inside a native call. `signs.py` draws its conclusions.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.agent.zygote.protocol import STACK_SIGNAL
from taskd.runtime.clock import file_time

PROMPT_S = 0.001
"""Between two bytecodes passes much less; a native call that does real work takes longer. It is
told in ticks of the kernel's clock, of 1 to 10 ms."""
_PYTHON_RUNS = "taskd: Python runs, {:.6f} s later\n"
_LATER = re.compile(r"^taskd: Python runs, ([\d.]+) s later$", re.MULTILINE)
_ANSWER = re.compile(r"^Current thread [^\n]*\n((?:  [^\n]*\n)*)", re.MULTILINE)


def offer(path: str) -> None:
    """To be called in the worker's main thread."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115 - open for as long as the process lives

    def say(signum: int, frame: object) -> None:
        with suppress(OSError):
            stacks_written_at = os.fstat(file.fileno()).st_mtime
            later_s = max(0.0, file_time() - stacks_written_at)
            file.write(_PYTHON_RUNS.format(later_s).encode())

    signal.signal(STACK_SIGNAL, say)
    faulthandler.register(STACK_SIGNAL, file, all_threads=True, chain=True)
    # Asked while the interpreter ends and has no handlers any more, it must not die of it.
    atexit.register(_fall_silent)


def _fall_silent() -> None:
    faulthandler.unregister(STACK_SIGNAL)
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    """All that was written."""
    place: str
    """The stack of the thread that was asked, which is the main one."""
    python: bool
    """It was between two bytecodes."""


class StackFile:
    """The reader's side."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = 0
        self._text = ""

    def read(self) -> Answer | None:
        """What has been answered since the last answer that was read; None: nothing yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._known)
                raw = file.read()
        except OSError:
            return None
        self._known += len(raw)
        self._text += raw.decode(errors="replace")
        found = _ANSWER.search(self._text)
        if found is None:
            return None
        text, self._text = self._text, ""
        later = _LATER.search(text, found.end())
        return Answer(text, found[1], later is not None and float(later[1]) <= PROMPT_S)
