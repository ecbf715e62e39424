"""Finds the error in the last output of a process: what a person must read first.

Libraries may print warnings after the error while the interpreter shuts down, so the last lines of
the output are not always those that matter.
"""

from __future__ import annotations

import re

_TRACEBACK = re.compile(r"^(\[?[\w ]*\]?:? ?)Traceback \(most recent call last\):\s*$")


def error_lines(text: str, most: int) -> list[str]:
    """The end of the last traceback; without one, the last lines."""
    lines = text.strip().splitlines()
    found = _last_traceback(lines)
    if found is None:
        return lines[-most:]
    begin, prefix = found
    end = begin + 1
    while end < len(lines) and _is_inside(lines[end], prefix):
        end += 1
    return lines[begin : end + 1][-most:]


def key_line(text: str) -> str:
    """The one line that names the error."""
    lines = [line.strip() for line in error_lines(text, most=1) if line.strip()]
    return lines[-1] if lines else ""


def _last_traceback(lines: list[str]) -> tuple[int, str] | None:
    for at in range(len(lines) - 1, -1, -1):
        if match := _TRACEBACK.match(lines[at]):
            return at, match[1]
    return None


def _is_inside(line: str, prefix: str) -> bool:
    """Frames are indented below the header; the line of the exception is not."""
    return line.removeprefix(prefix)[:1] in ("", " ", "\t")
