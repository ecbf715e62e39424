"""The profiling files of one rank, and the size limit for all ranks of the node together.

    <base>/<job>/<rank>/<unix time in seconds when the file was created>

A file is closed at 10 MiB. The limit counts everything under `base`. A writer locks `base` and
removes the oldest files of any rank until there is room, so the limit is never exceeded, however
small it is. Symbolic links are refused at every level: a user with write access there could point
one at any file. A folder in /tmp that others can write is refused, too.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from taskd.errors import SettingsError, Transient
from taskd.runtime.clock import Clock, wall
from taskd.runtime.files import private_files as files

FILE_BYTES = 10 * 1024 * 1024
FILES_AT_LEAST = 8
"""A small limit is divided into at least this many files, so that making room keeps most of it."""
MB = 1024 * 1024
PATH_CHARS = 1024
NEVER_REMOVED = "parallel_group.json"
LOCK = ".lock"
ASCEND_DIR = Path("/user/cluster-info/profiling")


class CannotWrite(Transient):
    """The records cannot be written now. The message is for the user who asked for them."""


class RecordFiles:
    def __init__(self, base: Path, job: str, rank: int, limit_mb: int, clock: Clock = wall) -> None:
        self._base, self._rank_dir = base, base / job / str(rank)
        self._clock = clock
        self._limit = limit_mb * MB
        self._file_bytes = min(FILE_BYTES, max(self._limit // FILES_AT_LEAST, 1))

    def append(self, lines: list[str]) -> int:
        """Append the lines. Returns how many were left out because the limit is too small.

        CannotWrite: nothing was written.
        """
        if not self._limit:
            raise CannotWrite("the limit on profiling data is 0 MB: nothing is written")
        if len(str(self._rank_dir)) > PATH_CHARS:
            raise CannotWrite(f"the path has more than {PATH_CHARS} characters")
        try:
            return self._append_locked(lines)
        except OSError as error:
            raise CannotWrite(f"{error.filename or self._rank_dir}: {error.strerror}") from error

    def _append_locked(self, lines: list[str]) -> int:
        if files.is_user_folder(self._base.parent):
            _make_private(self._base.parent)
        for folder in (self._base, self._rank_dir.parent, self._rank_dir):
            _make(folder)
        with _locked(self._base / LOCK):
            kept, size = _newest_that_fit(lines, self._limit)
            self._make_room(size)
            written = 0
            while written < len(kept):
                written += self._append_to_file(kept[written:])
            return len(lines) - len(kept)

    def _append_to_file(self, lines: list[str]) -> int:
        """Append as many lines as fit into the current file. Returns their number."""
        path, size = self._current()
        room, chunk, count = self._file_bytes - size, bytearray(), 0
        for line in lines:
            if chunk and len(chunk) + len(line) > room:
                break
            chunk += line.encode()
            count += 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(path, flags, 0o644)
        try:
            rest = memoryview(chunk)
            while rest:  # A disk that is nearly full writes a part before it fails.
                rest = rest[os.write(file, rest) :]
        except OSError:
            os.ftruncate(file, size)  # Leave no partial line behind.
            raise
        finally:
            os.close(file)
        return count

    def _current(self) -> tuple[Path, int]:
        """The newest file if it has room, otherwise a new one."""
        names = [int(entry.name) for entry in os.scandir(self._rank_dir) if entry.name.isdecimal()]
        newest = max(names, default=0)
        path = self._rank_dir / str(newest)
        if newest:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                raise CannotWrite(f"{path} is a symbolic link")
            if status.st_size < self._file_bytes:
                return path, status.st_size
        return self._rank_dir / str(max(int(self._clock()), newest + 1)), 0

    def _make_room(self, wanted: int) -> None:
        files = sorted(_files(self._base))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + wanted <= self._limit:
                return
            if path.name == NEVER_REMOVED:
                continue
            with suppress(FileNotFoundError):
                path.unlink()
            total -= size
        if total + wanted > self._limit:
            raise CannotWrite(f"the files in {self._base} that must stay exceed the limit")


def _newest_that_fit(lines: list[str], limit: int) -> tuple[list[str], int]:
    size, first = 0, len(lines)
    while first and size + len(lines[first - 1]) <= limit:
        first -= 1
        size += len(lines[first])
    return lines[first:], size


def _files(base: Path) -> Iterator[tuple[float, int, Path]]:
    """Time of the last change, size and path of all record files of all jobs and ranks."""
    for job in _folders(base):
        for rank in _folders(job):
            for entry in os.scandir(rank):
                with suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        yield status.st_mtime, status.st_size, Path(entry.path)


def _folders(path: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        yield from [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]


def _make(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o755, parents=True)
    mode = folder.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise CannotWrite(f"{folder} is a symbolic link")
    if not stat.S_ISDIR(mode):
        raise CannotWrite(f"{folder} is not a directory")


def _make_private(folder: Path) -> None:
    try:
        files.make_private(folder)
    except SettingsError as error:
        raise CannotWrite(str(error)) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Held for a short time, and in a thread that no other thread waits for."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def base_dir(configured: str) -> Path:
    """Where records go: as configured, else Ascend's folder, else a private folder of the user."""
    if configured:
        return Path(configured)
    if os.path.isdir(ASCEND_DIR.parent):
        return ASCEND_DIR
    return files.user_folder() / "profiling"
