"""Reads a small file that another program has written, and may be writing still."""

from __future__ import annotations

import os
import stat

LIMIT_BYTES = 1024 * 1024


def read(path: str, limit: int = LIMIT_BYTES) -> bytes:
    """The content. OSError if it is missing, a symbolic link, no plain file, or too large.

    A link is refused because whoever may write into the directory could aim it at any file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # A pipe must not block.
    descriptor = os.open(path, flags)
    try:
        there = os.fstat(descriptor)
        if not stat.S_ISREG(there.st_mode):
            raise OSError(f"{path} is no plain file")
        content = b""
        while len(content) <= limit and (more := os.read(descriptor, limit + 1 - len(content))):
            content += more
    finally:
        os.close(descriptor)
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content
