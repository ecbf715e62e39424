"""Two small files per rank in shared memory, between the agent and a training process.

The *switch* is one word: which parts the agent wants recorded. A training process reads it at the
end of every step, which costs less than a microsecond; so a job that is not profiled has no extra
thread, connection or hook. The *pace* is the process's timing while it is recorded; the file is
replaced as a whole, about once per second.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path

from taskd.model.profiling import Pace, Part
from taskd.wire.json_codec import TypeMismatch, from_plain, to_plain
from taskd.wire.json_reading import loads

SIZE = 64
_WORD = struct.Struct("<Q")
PACE_SUFFIX = ".pace"


class SharedSwitch:
    """The word, for both sides. Without a path it is private memory of this process."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        if path:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.ftruncate(file, SIZE)
                self._memory = mmap.mmap(file, SIZE)
            finally:
                os.close(file)
        else:
            self._memory = mmap.mmap(-1, SIZE)
        self.word = memoryview(self._memory).cast("Q")
        """`word[0]` is the switch, for the fastest possible read."""

    def want(self, parts: Part) -> None:
        _WORD.pack_into(self._memory, 0, int(parts))

    @property
    def wanted(self) -> Part:
        return Part(self.word[0] & 31)

    def publish_pace(self, pace: Pace) -> None:
        """The worker's side. Replaces the file atomically."""
        if not self.path:
            return
        draft = f"{self.path}{PACE_SUFFIX}.new"
        with open(draft, "w") as file:
            json.dump(to_plain(pace), file)
        os.replace(draft, self.path + PACE_SUFFIX)


def read_pace(path: str) -> Pace | None:
    """The agent's side. None: no pace yet, or one in a format of another version."""
    try:
        return from_plain(Pace, loads(Path(path + PACE_SUFFIX).read_text()))
    except (OSError, ValueError, TypeMismatch):
        return None


def forget(path: str) -> None:
    for name in (path, path + PACE_SUFFIX, f"{path}{PACE_SUFFIX}.new"):
        Path(name).unlink(missing_ok=True)
