"""Nodes that were not told their rank draw one from the store on the first node.

A place in the store names the machine that took it, so that a launcher that is started again gets
the place that its predecessor on this machine had. Whether that one is dead is told by the claim,
a name that only one process of a machine can hold (`claim`). It is taken before the store is
asked, so no two launchers can believe that a place is theirs.

`draw` runs in a process of its own (`main`), because it needs torch and the launcher must not.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from taskd.config import environ
from taskd.errors import SettingsError

RENEWED = "taskd/renewed"
"""Set in a store that took the place of another: it does not know who had drawn what."""


class Store(Protocol):
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def claim(job: str, node: int) -> socket.socket | None:
    """The name of a node's part of the job, for as long as it is open; None: another has it."""
    held = socket.socket(socket.AF_UNIX)
    try:
        held.bind(f"\0taskd/{job}/{node}")
    except OSError as error:
        held.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return held


def machine(name: str) -> str:
    """This machine, or this container on it: where a claim reaches."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    network = os.stat("/proc/self/ns/net").st_ino
    return f"{name or socket.gethostname()} {boot} {network}"


def draw(store: Store, job: str, first: int, here: str) -> tuple[int, socket.socket]:
    """The least free place from `first` on, or that of a dead predecessor on this machine."""
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


def ask(
    endpoint: tuple[str, int], job: str, first: int, name: str, timeout_s: float
) -> tuple[int, socket.socket]:
    """Draw in a process of its own; raises SettingsError when there is no store to draw from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host, port = endpoint
    words = [host, str(port), job, str(first), machine(name), str(timeout_s)]
    leash = [
        sys.executable,
        "-m",
        "taskd.agent.die_with_parent",
        str(os.getpid()),
        "taskd.agent.run.node_ranks",
    ]
    with ours:
        with theirs:
            drawing = subprocess.Popen(
                [*leash, str(theirs.fileno()), *words],
                pass_fds=[theirs.fileno()],
                env={**environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},  # not every failed attempt
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        try:
            text, files, _, _ = socket.recv_fds(ours, 4096, 1)
        finally:
            drawing.kill()
            drawing.wait()
    if not files:
        raise SettingsError([text.decode() or f"no node rank could be drawn from {host}:{port}"])
    return int(text), socket.socket(fileno=files[0])


def main() -> None:
    file, host, port, job, first, here, timeout = sys.argv[1:]
    from torch._C._distributed_c10d import TCPStore

    with socket.socket(fileno=int(file)) as pipe:
        try:
            limit = timedelta(seconds=float(timeout))
            store = TCPStore(host, int(port), None, False, limit, wait_for_workers=False)
            renewed = store.check([RENEWED])
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            pipe.send(
                f"no first node at {host}:{port} in {timeout} s ({why}): is one of the machines "
                f"{host}? Otherwise give every node its --node-rank".encode()
            )
            return
        if renewed:
            pipe.send(b"the job has started anew by now: give this node its --node-rank")
            return
        node, held = draw(store, job, int(first), here)
        socket.send_fds(pipe, [str(node).encode()], [held.fileno()])


if __name__ == "__main__":
    main()
