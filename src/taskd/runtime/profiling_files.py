"""Two small files a rank in shared memory, between the agent and a training process.

The *page* is one word: which parts the agent wants recorded. A training process looks at it at the
end of every step, which costs it less than a microsecond; so a job that nobody looks into has no
thread, no connection and no hook more than a bare one. The *pace* is how the process fares while
it is recorded; it is replaced as a whole, about once a second.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from pathlib import Path

from taskd.model.profiling import Pace, Part
from taskd.wire.json_codec import Misfit, from_plain, to_plain

SIZE = 64
_WORD = struct.Struct("<Q")
PACE_SUFFIX = ".pace"


class Page:
    """Either side's view of the word. Without a path it is memory of this process alone."""

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
        """`word[0]` is what is wanted, for readers in a hurry."""

    def want(self, parts: Part) -> None:
        _WORD.pack_into(self._memory, 0, int(parts))

    @property
    def wanted(self) -> Part:
        return Part(self.word[0] & 31)

    def tell(self, pace: Pace) -> None:
        """The worker's side. Whole or not at all."""
        if not self.path:
            return
        draft = f"{self.path}{PACE_SUFFIX}.new"
        with open(draft, "w") as file:
            json.dump(to_plain(pace), file)
        os.replace(draft, self.path + PACE_SUFFIX)


def read_pace(path: str) -> Pace | None:
    """The agent's side. None: nothing has been told yet, or by somebody who speaks otherwise."""
    try:
        return from_plain(Pace, json.loads(Path(path + PACE_SUFFIX).read_text()))
    except (OSError, ValueError, Misfit):
        return None


def forget(path: str) -> None:
    for name in (path, path + PACE_SUFFIX, f"{path}{PACE_SUFFIX}.new"):
        Path(name).unlink(missing_ok=True)
