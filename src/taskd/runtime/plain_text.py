"""Text of other people, made safe for a terminal and for a log: no escapes, no forged lines."""

from __future__ import annotations

import logging
import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, and characters that reverse the direction of text."""


def one_line(text: str) -> str:
    """The same text with unsafe characters written as `\\x1b`."""
    return _UNSAFE.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )


def is_plain(text: str) -> bool:
    return _UNSAFE.search(text) is None


class OneLineFormatter(logging.Formatter):
    """One event is one line; only a traceback has more."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(map(one_line, text.split("\n")))
