"""The profiling files of one rank, and the limit on what all ranks of the node keep together.

    <base>/<job>/<rank>/<unix seconds of its beginning>

A file is closed for good at 10 MiB. The limit counts everything under `base`; whoever wants to
write holds a lock on it, and removes the oldest files of any rank until there is room, so the
limit is never passed, however small it is. Links are refused at every level: whoever may write
there could aim one at any file. So is a folder in /tmp that is not ours alone.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskd.errors import SettingsError, Transient
from taskd.runtime import private_folder as own_folder
from taskd.runtime.clock import Clock, wall

FILE_BYTES = 10 * 1024 * 1024
FILES_AT_LEAST = 8
"""A small limit is cut into at least so many files, so that making room does not empty it."""
MB = 1024 * 1024
PATH_CHARS = 1024
KEPT = "parallel_group.json"
LOCK = ".lock"
ASCEND_DIR = Path("/user/cluster-info/profiling")


class CannotKeep(Transient):
    """The records cannot be written now; says why, in words for the person who asked for them."""


class Shelf:
    def __init__(self, base: Path, job: str, rank: int, limit_mb: int, clock: Clock = wall) -> None:
        self._base, self._rank_dir = base, base / job / str(rank)
        self._clock = clock
        self._limit = limit_mb * MB
        self._file_bytes = min(FILE_BYTES, max(self._limit // FILES_AT_LEAST, 1))

    def keep(self, lines: list[str]) -> int:
        """Append the lines. Returns how many were left out because the limit is too small.

        Raises CannotKeep; then nothing was written.
        """
        if not self._limit:
            raise CannotKeep("the limit on profiling data is 0 MB: nothing is kept")
        if len(str(self._rank_dir)) > PATH_CHARS:
            raise CannotKeep(f"the path has more than {PATH_CHARS} characters")
        try:
            return self._keep(lines)
        except OSError as error:
            raise CannotKeep(f"{error.filename or self._rank_dir}: {error.strerror}") from error

    def _keep(self, lines: list[str]) -> int:
        if self._base.parent == own_folder.place():
            _make_own(self._base.parent)
        for folder in (self._base, self._rank_dir.parent, self._rank_dir):
            _make(folder)
        with _locked(self._base / LOCK):
            kept, size = _newest_that_fit(lines, self._limit)
            self._make_room(size)
            written = 0
            while written < len(kept):
                written += self._append(kept[written:])
            return len(lines) - len(kept)

    def _append(self, lines: list[str]) -> int:
        """As many as fit into the current file. Returns how many."""
        path, size = self._current()
        room, chunk, taken = self._file_bytes - size, bytearray(), 0
        for line in lines:
            if chunk and len(chunk) + len(line) > room:
                break
            chunk += line.encode()
            taken += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o644)
        try:
            left = memoryview(chunk)
            while left:  # a disk that is nearly full takes a part first, and only then complains
                left = left[os.write(file, left) :]
        except OSError:
            os.ftruncate(file, size)  # no torn line stays behind
            raise
        finally:
            os.close(file)
        return taken

    def _current(self) -> tuple[Path, int]:
        """The newest file while it has room, otherwise a new one."""
        names = [int(entry.name) for entry in os.scandir(self._rank_dir) if entry.name.isdecimal()]
        newest = max(names, default=0)
        path = self._rank_dir / str(newest)
        if newest:
            there = path.lstat()
            if stat.S_ISLNK(there.st_mode):
                raise CannotKeep(f"{path} is a symbolic link")
            if there.st_size < self._file_bytes:
                return path, there.st_size
        return self._rank_dir / str(max(int(self._clock()), newest + 1)), 0

    def _make_room(self, wanted: int) -> None:
        files = sorted(_files(self._base))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + wanted <= self._limit:
                return
            if path.name == KEPT:
                continue
            with suppress(FileNotFoundError):
                path.unlink()
            total -= size
        if total + wanted > self._limit:
            raise CannotKeep(f"what must stay in {self._base} is over the limit by itself")


def _newest_that_fit(lines: list[str], limit: int) -> tuple[list[str], int]:
    size, first = 0, len(lines)
    while first and size + len(lines[first - 1]) <= limit:
        first -= 1
        size += len(lines[first])
    return lines[first:], size


def _files(base: Path) -> Iterator[tuple[float, int, Path]]:
    """Age, size and path of every record file of every job and rank."""
    for job in _folders(base):
        for rank in _folders(job):
            for entry in os.scandir(rank):
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        there = entry.stat(follow_symlinks=False)
                        yield there.st_mtime, there.st_size, Path(entry.path)


def _folders(path: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        yield from [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]


def _make(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o755, parents=True)
    there = folder.lstat()
    if stat.S_ISLNK(there.st_mode):
        raise CannotKeep(f"{folder} is a symbolic link")
    if not stat.S_ISDIR(there.st_mode):
        raise CannotKeep(f"{folder} is no directory")


def _make_own(folder: Path) -> None:
    try:
        own_folder.make(folder)
    except SettingsError as error:
        raise CannotKeep(str(error)) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """For a moment only, and in a thread that nobody waits for."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def base_dir(configured: str) -> Path:
    """Where records go: as configured, else Ascend's place, else one of the user's own."""
    if configured:
        return Path(configured)
    if os.path.isdir(ASCEND_DIR.parent):
        return ASCEND_DIR
    return own_folder.place() / "profiling"
