"""Several machines made of network namespaces, at one switch; each can be cut off and returned.

    machine 0  eth0 10.86.0.1 ---- switch ---- 10.86.0.2 eth0  machine 1, and so on
                                 10.86.0.254

Needs root. The namespaces are always removed at the end, with everything in them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.integration.namespaces import IP

NET = "10.86.0"


@dataclass(frozen=True)
class Machines:
    tag: str
    count: int

    @property
    def switch(self) -> str:
        return f"taskd-sw-{self.tag}"

    def name(self, machine: int) -> str:
        return f"taskd-m{machine}-{self.tag}"

    def address(self, machine: int) -> str:
        return f"{NET}.{machine + 1}"

    def inside(self, machine: int) -> list[str]:
        """The prefix that makes a command run on this machine, with the same pid."""
        return [IP, "netns", "exec", self.name(machine)]

    def inside_switch(self) -> list[str]:
        """The same for a command that always reaches all machines that are not cut off."""
        return [IP, "netns", "exec", self.switch]

    def cut(self, machine: int) -> None:
        """No packet passes any more, and no process gets a notice."""
        _ip("-n", self.switch, "link", "set", f"port{machine}", "down")

    def join(self, machine: int) -> None:
        _ip("-n", self.switch, "link", "set", f"port{machine}", "up")

    def cut_port(self, machine: int, port: int) -> None:
        """Nothing that this machine sends to this TCP port arrives; all else passes."""
        _ip("-n", self.name(machine), "rule", "add", *_drop(port))

    def join_port(self, machine: int, port: int) -> None:
        _ip("-n", self.name(machine), "rule", "delete", *_drop(port))


@contextmanager
def machines(count: int) -> Iterator[Machines]:
    made = Machines(str(os.getpid() % 100_000), count)
    names = [made.switch, *(made.name(machine) for machine in range(count))]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", made.switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", made.switch, "addr", "add", f"{NET}.254/24", "dev", "bridge")
        _ip("-n", made.switch, "link", "set", "bridge", "up")
        for machine in range(count):
            _plug(made, machine)
        yield made
    finally:
        for name in names:
            subprocess.run([IP, "netns", "delete", name], capture_output=True)


def _drop(port: int) -> list[str]:
    return ["blackhole", "ipproto", "tcp", "dport", str(port)]


def _plug(made: Machines, machine: int) -> None:
    name, port = made.name(machine), f"port{machine}"
    ours, theirs = f"tm{machine}{made.tag}", f"tp{machine}{made.tag}"
    _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
    _ip("link", "set", ours, "netns", name, "name", "eth0")
    _ip("link", "set", theirs, "netns", made.switch, "name", port)
    _ip("-n", made.switch, "link", "set", port, "master", "bridge")
    _ip("-n", made.switch, "link", "set", port, "up")
    _ip("-n", name, "addr", "add", f"{made.address(machine)}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")


def _ip(*words: str) -> None:
    done = subprocess.run([IP, *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
