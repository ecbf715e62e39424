"""How a worker's script ended, in a file: the exit status of its process says less.

The worker writes the file (`zygote/program.py`), the agent reads it when the process is gone. A
process can still be killed, or abort in the interpreter's shutdown, after its script has ended.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from taskd.model.messages import ScriptError
from taskd.wire.json_codec import TypeMismatch, from_plain, to_plain
from taskd.wire.json_reading import loads

MESSAGE_CHARS = 500


@dataclass(frozen=True, slots=True)
class ScriptResult:
    ended: bool = False
    """It returned, or called `sys.exit(0)`, and its threads and exit handlers have ended."""
    error: ScriptError | None = None
    """The exception that it did not catch."""


def write(path: str, result: ScriptResult) -> None:
    """Without the file, for example on a full disk, only the exit status counts."""
    with suppress(OSError):
        Path(path).write_text(json.dumps(to_plain(result)))


def read(path: Path) -> ScriptResult:
    try:
        return from_plain(ScriptResult, loads(path.read_text()))
    except (OSError, ValueError, TypeMismatch):
        return ScriptResult()


def describe(error: BaseException) -> ScriptError:
    """`error` without our own frames in its traceback."""
    types = tuple(kind.__name__ for kind in type(error).__mro__ if kind is not object)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    return ScriptError(types, place, str(error)[:MESSAGE_CHARS])
