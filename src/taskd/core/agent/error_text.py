"""Finds the error in the last output of a process: what a person must read first.

Libraries may print warnings after the error while the interpreter shuts down, so the last lines of
the output are not always those that matter.
"""

from __future__ import annotations

import re

_TRACEBACK = re.compile(r"^(\[?[\w ]*\]?:? ?)Traceback \(most recent call last\):\s*$")

_OF_STACKS = "(most recent call first)"
"""In the stacks that a process writes about itself while it runs."""
_OF_RANK = re.compile(r"^\[rank\d+\]: ")
"""What torch writes before each line of a traceback."""
_FROM_OUTSIDE = re.compile(r"signal (?:9|15)\b(?:, SIG[A-Z]+)?")
"""Whatever such a process printed last is not why it ended."""
_ENDED = re.compile(r"exit code -?\d+|signal \d+(?:, SIG[A-Z0-9]+)?")


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


def headline(text: str) -> str:
    """The one line of a fault's evidence that a person must read.

    Of a traceback that is its end. Stacks of a hung rank follow the sentence that says what is
    wrong with it.
    """
    lines = text.strip().splitlines()
    has_traceback = _last_traceback(lines) is not None
    if not has_traceback and (killed := _FROM_OUTSIDE.match(text)):
        return killed[0]
    is_dump = any(_OF_STACKS in line for line in lines) and not has_traceback
    line = lines[0].strip() if is_dump else key_line(text)
    return _OF_RANK.sub("", line)


def fault_line(text: str) -> str:
    """The same, with how the process ended."""
    line, ended = headline(text), _ENDED.match(text)
    return line if ended is None or line.startswith(ended[0]) else f"{ended[0]}: {line}"


def shortened(text: str, most: int) -> str:
    """The first line and the end: both may say what is wrong."""
    if len(text) <= most:
        return text
    first = text.partition("\n")[0][: most // 2]
    return f"{first}\n…\n{text[len(first) + 3 - most :]}"


def _last_traceback(lines: list[str]) -> tuple[int, str] | None:
    for at in range(len(lines) - 1, -1, -1):
        if match := _TRACEBACK.match(lines[at]):
            return at, match[1]
    return None


def _is_inside(line: str, prefix: str) -> bool:
    """Frames are indented below the header; the line of the exception is not."""
    return line.removeprefix(prefix)[:1] in ("", " ", "\t")
