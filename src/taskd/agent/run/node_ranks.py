"""Nodes without a given rank draw one from the store on the first node.

The store keeps for each node rank the machine that drew it, so that a launcher that is started
again gets the rank of its predecessor on the same machine. Whether the predecessor is dead is shown
by the claim, a locked file that only one process per machine can hold (`claim`). The claim is taken
before the store is asked, so two launchers can never both get the same rank.

`draw` runs in a process of its own (`main`), because it needs torch, which the launcher must not
import.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import uuid
from contextlib import suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from taskd.agent.process_lifetime import command_with_parent
from taskd.clusterd.locate import directory
from taskd.config import environ
from taskd.errors import SettingsError
from taskd.runtime.clock import wall

SUFFIX, SWEPT_S = ".claim", 86_400.0
"""Of the files; how old one is that may be removed, if no process holds it."""
RENEWED = "taskd/renewed"
"""Set in a store that replaces another one: it does not know the ranks that were drawn before."""


class Store(Protocol):
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class Claim:
    """A locked file. The kernel releases it when the last process that has it open ends."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self.descriptor = path, descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self.descriptor)
            self.descriptor = -1

    def release(self) -> None:
        """Another process has received the descriptor, and holds the claim from now on."""
        os.close(self.descriptor)
        self.descriptor = -1


def claim(job: str, node: int) -> Claim | None:
    """Claim a node's part of the job until it is closed; None: another process has it.

    The file is in a folder that only this user can write: no other user can take a claim. Raises
    SettingsError if there is no such folder.
    """
    path = _claim_path(job, node)
    _sweep(path.parent)
    return _lock(path)


def _sweep(folder: Path) -> None:
    """Remove the files of launchers that were killed."""
    for old in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            if wall() - old.stat().st_mtime > SWEPT_S and (left := _lock(old)) is not None:
                left.close()


def _lock(path: Path) -> Claim | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if _is_at(path, descriptor):
            return Claim(path, descriptor)
        os.close(descriptor)  # its last holder has just removed it


def _claim_path(job: str, node: int) -> Path:
    """Containers with a network of their own are machines of their own."""
    network = os.stat("/proc/self/ns/net").st_ino
    name = blake2b(f"{network}/{job}/{node}".encode(), digest_size=16).hexdigest()
    return directory() / f"{name}{SUFFIX}"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def machine_id(name: str) -> str:
    """Names this machine, or this container on it: the scope of a claim."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{name or socket.gethostname()} {boot} {network}"


def draw(store: Store, job: str, first: int, here: str) -> tuple[int, Claim]:
    """The lowest free rank from `first` on, or the rank of a dead predecessor on this machine."""
    mine, node = f"{here} {uuid.uuid4()}", first
    while True:
        held = claim(job, node)
        if held is not None:
            key = f"taskd/{job}/node/{node}"
            found = store.compare_set(key, "", mine).decode()
            if found.rpartition(" ")[0] == here:
                found = store.compare_set(key, found, mine).decode()
            if found == mine:
                return node, held
            held.close()
        node += 1


def draw_in_process(
    endpoint: tuple[str, int], job: str, first: int, name: str, timeout_s: float
) -> tuple[int, Claim]:
    """Draw in a process of its own; raises SettingsError if no store answers."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host, port = endpoint
    arguments = [host, str(port), job, str(first), machine_id(name), str(timeout_s)]
    with ours:
        with theirs:
            process = subprocess.Popen(
                command_with_parent(__name__, str(theirs.fileno()), *arguments),
                pass_fds=[theirs.fileno()],
                env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # do not log every failed attempt
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            text, files, _, _ = socket.recv_fds(ours, 4096, 1)
        finally:
            process.kill()
            process.wait()
    if not files:
        raise SettingsError(
            [
                text.decode()
                or f"could not draw a node rank from the store at {host}:{port}: the process that "
                "draws has died; see its output above, or give every node its --node-rank"
            ]
        )
    return int(text), Claim(_claim_path(job, int(text)), files[0])


def main() -> None:
    file, host, port, job, first, here, timeout = sys.argv[1:]
    from torch.distributed import TCPStore

    with socket.socket(fileno=int(file)) as pipe:
        try:
            limit = timedelta(seconds=float(timeout))
            store = TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
            renewed = store.check([RENEWED])
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            pipe.send(
                f"no first node answered at {host}:{port} within {timeout} s ({reason}): start a "
                f"node on the machine {host}, or give every node its --node-rank".encode()
            )
            return
        if renewed:
            pipe.send(
                b"the store has been restarted and no longer knows the drawn node ranks: "
                b"give this node its --node-rank"
            )
            return
        node, held = draw(store, job, int(first), here)
        socket.send_fds(pipe, [str(node).encode()], [held.descriptor])
        held.release()


if __name__ == "__main__":
    main()
