"""A log file that several processes may share, created when its first line is written.

A log that cannot be opened must not keep a job from training: then the lines go to standard error,
after one warning, until the file works again. The process that finds the file full and gets the
lock of its directory rotates it; the others then open the new one. `runtime/log.py` decides which
lines come here and how they look.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from io import TextIOWrapper
from pathlib import Path

DIRECTORY_MODE, FILE_MODE, BACKUP_MODE = 0o750, 0o640, 0o440

_STAMP = "%Y-%m-%dT%H-%M-%S.%f"
_STAMPED = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d\.\d{3}")


class RotatingHandler(logging.FileHandler):
    """Appends to a file that is created when first needed and renamed when full."""

    def __init__(
        self,
        filename: str | os.PathLike[str],
        max_bytes: int = 0,
        backups: int = 0,
        encoding: str | None = None,
        backup_mode: int = BACKUP_MODE,
    ) -> None:
        super().__init__(filename, mode="a", encoding=encoding or "utf-8", delay=True)
        self.max_bytes = max_bytes
        self.backups = backups
        self.backup_mode = backup_mode
        self._warned = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
        except (TypeError, ValueError, KeyError):
            # The arguments do not fit the format: reported in the way of the logging module.
            self.handleError(record)
            return
        try:
            stream = self._ready(len(line), record.created)
            stream.write(line)
            stream.flush()
        except OSError as error:
            self._fall_back(line, error)
        else:
            self._warned = False

    def _ready(self, more: int, now: float) -> TextIOWrapper:
        """The open file, with room for `more` characters."""
        if self.stream is not None and self._was_replaced(self.stream):
            self.close_file()
        if self.stream is None:
            self.stream = self._open()
        if self._is_full(self.stream, more) and self._rotated(self.stream, now):
            self.close_file()
            self.stream = self._open()
        return self.stream

    def close_file(self) -> None:
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def _fall_back(self, line: str, error: OSError) -> None:
        if sys.stderr is None:
            return
        if not self._warned:
            sys.stderr.write(
                f"taskd: cannot write the log file, writing to standard error: {error}\n"
            )
            self._warned = True
        sys.stderr.write(line)

    def _open(self) -> TextIOWrapper:
        path = Path(self.baseFilename)
        _make_directory(path.parent)
        new = not path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, FILE_MODE)
        if new:
            os.fchmod(descriptor, FILE_MODE)
        return open(descriptor, "a", encoding=self.encoding)

    def _was_replaced(self, stream: TextIOWrapper) -> bool:
        """Whether our file was renamed by another process, or removed."""
        try:
            there = os.stat(self.baseFilename)
        except FileNotFoundError:
            return True
        mine = os.fstat(stream.fileno())
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _is_full(self, stream: TextIOWrapper, more: int) -> bool:
        held = os.fstat(stream.fileno())
        if self.max_bytes <= 0 or not stat.S_ISREG(held.st_mode):
            return False
        return held.st_size > 0 and held.st_size + more > self.max_bytes

    def _rotated(self, stream: TextIOWrapper, now: float) -> bool:
        """Rotate, unless another process does. True: a new file must be opened."""
        path = Path(self.baseFilename)
        with _locked(path.parent) as mine:
            if not mine:
                return False  # another process is rotating: one more line may go to the old file
            if not self._was_replaced(stream):
                self._back_up(path, now)
        return True

    def _back_up(self, path: Path, now: float) -> None:
        before = _backups(path)
        moment = datetime.fromtimestamp(now, UTC)
        if before and before[-1][0] < moment + timedelta(minutes=1):
            # Names stay in order even within one millisecond.
            moment = max(moment, before[-1][0] + timedelta(milliseconds=1))
        stamp = moment.strftime(_STAMP)[:-3]
        backup = path.rename(path.with_name(f"{path.stem}-{stamp}{path.suffix}"))
        backup.chmod(self.backup_mode)
        for _, oldest in before[: max(0, len(before) + 1 - self.backups)]:
            oldest.unlink(missing_ok=True)


def _backups(path: Path) -> list[tuple[datetime, Path]]:
    """The backups of a log file with their times, oldest first."""
    found = ((_moment(path, entry.name), entry) for entry in path.parent.iterdir())
    return sorted((moment, entry) for moment, entry in found if moment)


def _moment(path: Path, name: str) -> datetime | None:
    stamp = name.removeprefix(f"{path.stem}-").removesuffix(path.suffix)
    if name != f"{path.stem}-{stamp}{path.suffix}" or not _STAMPED.fullmatch(stamp):
        return None
    try:
        return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None


def _make_directory(path: Path) -> None:
    if path.is_symlink():
        raise NotADirectoryError(f"{path} is a symbolic link")
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        return
    path.chmod(DIRECTORY_MODE)  # independent of the umask


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
