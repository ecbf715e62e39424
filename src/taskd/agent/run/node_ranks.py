"""Nodes without a given rank draw one from the store on the first node.

The store keeps for each node rank the machine that drew it, so that a launcher that is started
again gets the rank of its predecessor on the same machine. Whether the predecessor is dead is shown
by the claim, a name that only one process per machine can hold (`claim`). The claim is taken before
the store is asked, so two launchers can never both get the same rank.

`draw` runs in a process of its own (`main`), because it needs torch, which the launcher must not
import.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import uuid
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from taskd.agent.process_lifetime import command_with_parent
from taskd.config import environ
from taskd.errors import SettingsError

RENEWED = "taskd/renewed"
"""Set in a store that replaces another one: it does not know the ranks that were drawn before."""


class Store(Protocol):
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def claim(job: str, node: int) -> socket.socket | None:
    """Claim a node's part of the job until the socket is closed; None: another process has it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0taskd/{_claim_name(job, node)}")
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def _claim_name(job: str, node: int) -> str:
    """Other users of the machine can take any name that they can guess: so it has the secret in it.

    Without a secret the name is that of the user, the job and the node.
    """
    key = environ.get("TASKD_TOKEN", "").encode()[: blake2b.MAX_KEY_SIZE]
    return blake2b(f"{os.getuid()}/{job}/{node}".encode(), digest_size=16, key=key).hexdigest()


def machine_id(name: str) -> str:
    """Names this machine, or this container on it: the scope of a claim."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{name or socket.gethostname()} {boot} {network}"


def draw(store: Store, job: str, first: int, here: str) -> tuple[int, socket.socket]:
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
) -> tuple[int, socket.socket]:
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
    return int(text), socket.socket(fileno=files[0])


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
        socket.send_fds(pipe, [str(node).encode()], [held.fileno()])


if __name__ == "__main__":
    main()
