"""Folders and files that other users or programs may tamper with: private folders, small files."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskd.errors import SettingsError

SHARED = Path("/tmp")
LIMIT_BYTES = 1024 * 1024
OPEN_FOLDERS = Path("/proc/self/fd")


def user_folder() -> Path:
    """The default folder for this user's files.

    If another user has taken its name, all processes of this user use another one.
    """
    usual = SHARED / f"taskd-{os.getuid()}"
    if not os.path.lexists(usual) or not why_not_private(usual):
        return usual
    while True:
        own = [path for path in SHARED.glob(f"{usual.name}.*") if not why_not_private(path)]
        if own:
            return min(own)
        tempfile.mkdtemp(prefix=f"{usual.name}.", dir=SHARED)


def is_user_folder(path: Path) -> bool:
    """Whether it was one of these, also if another user has since put something in its place."""
    return path.parent == SHARED and path.name.startswith(f"taskd-{os.getuid()}")


def make_private(path: Path) -> Path:
    """Create the folder if needed. SettingsError: another user could have put files there."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SettingsError([f"{path} cannot be used: {error}"]) from error
    if why := why_not_private(path):
        raise SettingsError([f"{path} must be a directory that only you can write: {why}"])
    return path


@contextmanager
def pinned(path: Path) -> Iterator[Path]:
    """The same folder by a name that always means this one. OSError: a link, or not a folder.

    Users who can write to its parent can put another folder in its place at any time: what is
    checked and what is used then differ. Not for other processes: they have other descriptors.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        yield OPEN_FOLDERS / str(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """Create the folder if needed, and pin it. SettingsError: as `make_private`."""
    make_private(path)
    try:
        with pinned(path) as folder:
            if why := why_not_private(folder):
                raise SettingsError([f"{path} must be a directory that only you can write: {why}"])
            yield folder
    except NotADirectoryError as error:
        raise SettingsError([f"{path} cannot be used: {error}"]) from error


def why_not_private(path: Path) -> str:
    """Why another user could have written into this folder; empty: only this user could."""
    try:
        found = path.stat() if path.parent == OPEN_FOLDERS else path.lstat()
    except OSError as error:
        return f"it cannot be used: {error.strerror}"
    if stat.S_ISLNK(found.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    return _why_not_mine(found, 0o022)


def why_not_private_with_files(path: Path) -> str:
    """The same of a folder with everything that is directly in it: files of this user only."""
    if why := why_not_private(path):
        return why
    # Where others cannot enter the folder, the modes of its files do not matter.
    forbidden = 0o022 if path.stat().st_mode & 0o077 else 0
    for one in path.iterdir():
        found = one.lstat()
        why = "it is not a regular file" if not stat.S_ISREG(found.st_mode) else ""
        if why := why or _why_not_mine(found, forbidden):
            return f"{one.name}: {why}"
    return ""


def _why_not_mine(found: os.stat_result, forbidden: int) -> str:
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}"
    return "other users can write it" if found.st_mode & forbidden else ""


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, also if it existed with another mode."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)


def open_regular(path: str | Path) -> int:
    """A descriptor to read from. OSError: missing, a symbolic link, or not a regular file.

    Links are refused because any user who may write into the directory could point one at any file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe must not block
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


def read_small(path: str, limit: int = LIMIT_BYTES) -> bytes:
    """The content. OSError: as `open_regular`, or too large."""
    content = b""
    with open(open_regular(path), "rb") as file:
        while len(content) <= limit and (more := file.read(limit + 1 - len(content))):
            content += more
    if len(content) > limit:
        raise OSError(f"{path} has more than {limit} bytes")
    return content
