"""The cache of torch.compile on a node: a replacement takes compiled code from it.

Inductor keeps what it has compiled in a folder that all ranks of a node share, so a replacement
finds the code of its predecessor there. But the C++ compiler writes a library in place: a rank that
is killed while it compiles leaves half a library behind, and every later process fails to load it.
So each rank removes such files before it starts.

The usual folder is in /tmp under a known name. If another user has created it, code of that user
would run in this job: a private folder is used instead.
"""

from __future__ import annotations

import getpass
import logging
import os
import re
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from taskd import config
from taskd.runtime.clock import wall
from taskd.runtime.files.private_files import make_private, user_folder
from taskd.torch import compat

log = logging.getLogger(__name__)

DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
RECENT_S = 24 * 3600.0
"""Older files have been loaded many times."""
ELF = struct.Struct("<4s36xQ10xHH2x")
"""Magic, the place of the section headers, their size and number. The linker writes them last."""


def prepare(is_replacement: bool) -> None:
    """Called in every rank before its script compiles anything."""
    directory = _directory()
    if not config.environ.get(DIRECTORY) and (why := _why_not_ours(directory)):
        private = make_private(user_folder()) / "torchinductor"
        log.warning(
            "torch.compile's cache %s is not used, because %s: code in it could run in this job. "
            "It is %s instead; remove the other one, or set %s",
            directory,
            why,
            private,
            DIRECTORY,
        )
        directory = private
        config.use_compile_cache(str(private))
    if directory.is_dir():
        remove_incomplete(directory, wall() - RECENT_S)
    if is_replacement:
        # Its code is in the cache. A pool of compiler processes would only take time to start.
        compat.compile_in_process()


def remove_incomplete(directory: Path, since: float) -> list[Path]:
    """Remove libraries that no process will ever finish. Returns them."""
    incomplete = [path for path in _libraries(directory, since) if not _is_complete(path)]
    if not incomplete:
        return []
    written = _open_files(Path("/proc"))
    removed = [path for path in incomplete if str(path.resolve()) not in written]
    for path in removed:
        with suppress(FileNotFoundError):
            path.unlink()
    if removed:
        log.warning(
            "torch.compile's cache had libraries of a process that was killed while it compiled: "
            "removed=%d directory=%s",
            len(removed),
            directory,
        )
    return removed


def _directory() -> Path:
    """As inductor chooses it."""
    if chosen := config.environ.get(DIRECTORY):
        return Path(chosen)
    try:
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    except (KeyError, OSError):  # a container may run under a user without a name
        user = f"uid_{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _why_not_ours(directory: Path) -> str:
    """Why other users could have put code there; empty: they could not, or it does not exist."""
    try:
        found = directory.lstat()
    except OSError:
        return ""
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}"
    return "other users can write it" if found.st_mode & stat.S_IWOTH else ""


def _libraries(directory: Path, since: float) -> Iterator[Path]:
    for folder in directory.glob("??"):
        if folder.is_symlink():
            continue  # what it points to is not a part of the cache
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith((".so", ".o")) and entry.stat().st_mtime >= since:
                    yield Path(entry.path)


def _is_complete(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            header = file.read(ELF.size)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return True  # removed by its owner, or not ours
    if len(header) < ELF.size:
        return False
    magic, sections_at, section_size, sections = ELF.unpack(header)
    return bool(magic == b"\x7fELF" and 0 < sections_at <= size - section_size * sections)


def _open_files(processes: Path) -> set[str]:
    """The files that processes have open, as far as we may know."""
    found: set[str] = set()
    for descriptors in processes.glob("[0-9]*/fd"):
        with suppress(OSError):
            found.update(_targets(descriptors.iterdir()))
    return found


def _targets(links: Iterable[Path]) -> Iterator[str]:
    for link in links:
        with suppress(OSError):
            yield str(link.readlink())
