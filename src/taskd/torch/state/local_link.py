"""A connection between two processes of one user on one machine, with nothing in between.

It is a Unix socket in the folder of the node in shared memory, which only its user can enter. The
kernel says at both ends which process the other one is. Both put that into the proofs that they
exchange with the job's key (`state_link.py`): if any other process has answered, the proofs differ.
So what arrives after the proofs is what the sender has written, and needs no digests.

Nothing that others can write, such as torch's store, decides whether a connection is local. In
another container, namespace or machine the socket has another name, or is not found; `connect` then
returns None at once, and TCP is used. The log (level debug) has the reason.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

from taskd.runtime.files.private_files import pinned
from taskd.runtime.limits.waiting_connections import MOST_WAITING

log = logging.getLogger(__name__)

BUFFER_BYTES = 4 << 20
"""As much as the kernel grants of that: with less, the two processes wait for each other more
often."""
_CREDENTIALS = struct.Struct("iII")
_PROCESS = Path("/proc/self")
_KERNEL = Path("/proc/sys/kernel")


@contextmanager
def listening(folder: Path | None, secret: bytes) -> Iterator[socket.socket | None]:
    """A socket for peers that know the secret; None where there can be none."""
    server, name = None, ""
    try:
        server, name = _listen(_usable(folder), secret)
    except OSError as error:
        log.debug("state is sent over TCP only: no socket for ranks of this node: %s", error)
    try:
        yield server
    finally:
        if server is not None:
            server.close()
            with suppress(OSError):
                os.unlink(f"{folder}/{name}")


def connect(folder: Path | None, secret: bytes, timeout_s: float) -> socket.socket | None:
    """To the process that listens there, or None if that is not surely one of this user here."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with _private(_usable(folder)) as path:
            connection.connect(f"{path}/{_name(secret)}")
        if not is_same_user(connection):
            raise PermissionError("another user listens there")
    except OSError as error:  # it is on another machine, for instance
        connection.close()
        log.debug("state is received over TCP: the sender has no socket on this node: %s", error)
        return None
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Whether the kernel says so of the process at the other end, and can see that process."""
    pid, uid = _peer(connection)
    return pid > 0 and uid == os.geteuid() != _unknown_user()


def both_ends(connection: socket.socket, *, listens: bool) -> bytes:
    """Names the two processes: the same at both ends, unless another process is in between."""
    peer, own = _peer(connection)[0], os.getpid()
    listener, caller = (own, peer) if listens else (peer, own)
    return f"{listener} {caller} {_namespace()}".encode()


def _usable(folder: Path | None) -> Path:
    if folder is None:
        raise FileNotFoundError("this process has no folder of its node (TASKD_BEACON is not set)")
    if not _tells_who_we_are():
        raise OSError("this system does not name the process at the other end of a socket")
    return folder


def _listen(folder: Path, secret: bytes) -> tuple[socket.socket, str]:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _private(folder) as path:
            server.bind(f"{path}/{_name(secret)}")
        server.listen(MOST_WAITING)
    except OSError:
        server.close()
        raise
    return server, _name(secret)


@contextmanager
def _private(folder: Path) -> Iterator[Path]:
    with pinned(folder) as path:
        found = path.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{folder} is open to other users")
        yield path


def _name(secret: bytes) -> str:
    """Processes in different namespaces get different names: they do not meet."""
    return f"state-{blake2b(secret + _namespace().encode(), digest_size=16).hexdigest()}"


def _namespace() -> str:
    """Where process and user numbers have the same meaning."""
    boot = (_KERNEL / "random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(_PROCESS / "ns" / kind) for kind in ("pid", "user"))])


def _unknown_user() -> int:
    """Users of other namespaces that have no number here are shown with this one."""
    return int((_KERNEL / "overflowuid").read_text())


def _tells_who_we_are() -> bool:
    """Sandboxes that imitate Linux may not."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with one, other:
        return _peer(one) == (os.getpid(), os.geteuid())


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process that has called listen or connect at the other end, and its user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid
