"""The first process of a container: makes its file system, drops its rights, runs its command.

Started by `container.py` in new mount, PID and UTS namespaces, with a JSON description as its only
argument. The files are the machine's own, read through a new root; what a container must not share
(/tmp, /run, /etc, /dev/shm, /proc, home directories) is its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sys
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC = 1, 32, 4096, 16384
OWN = {"proc", "tmp", "run", "root", "home", "etc", "lost+found"}

libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [word.encode() for word in (source, str(target), kind)]
    if libc.mount(*words, flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


def bind(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(str(source), target, flags=MS_BIND | MS_REC)


def main() -> None:
    about = json.loads(sys.argv[1])
    root = Path(about["root"])
    mount("tmpfs", root, "tmpfs", options="mode=755")
    for entry in Path("/").iterdir():
        target = root / entry.name
        if entry.is_symlink():
            target.symlink_to(entry.readlink())
        elif entry.is_dir() and entry.name not in OWN:
            bind(entry, target)
    for name, mode in (("proc", 0o555), ("tmp", 0o1777), ("run", 0o755), ("root", 0o755)):
        (root / name).mkdir()
        (root / name).chmod(mode)
    shutil.copytree("/etc", root / "etc", symlinks=True)
    mount("proc", root / "proc", "proc")
    mount("tmpfs", root / "dev" / "shm", "tmpfs", options="mode=1777")
    for source, target in about["mounts"]:
        # /var/run is a link to /run, which would lead out of the new root.
        if target.startswith("/var/run/"):
            target = target.replace("/var/run/", "/run/", 1)
        bind(Path(source), root / target.lstrip("/"))
    for source in about["programs"]:  # inside a directory of the container's own, as they may be
        inside = root / source.lstrip("/")
        # A volume on /tmp may have an empty directory there, from an earlier start.
        if not (inside.exists() and inside.samefile(source)):
            bind(Path(source), inside)
    if about["read_only"]:
        mount("", root, flags=MS_REMOUNT | MS_RDONLY)
    socket.sethostname(about["hostname"])
    os.chroot(root)
    os.chdir(about["directory"])
    rights = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    if about["user"]:
        user = str(about["user"])
        rights += [f"--reuid={user}", f"--regid={user}", f"--groups={user}"]
    words = [*rights, "--", *about["command"]]
    os.execvpe(words[0], words, about["env"])


if __name__ == "__main__":
    main()
