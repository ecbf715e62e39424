"""Two machines made of network namespaces, for the example that cuts a cable between them.

    first  eth0 10.84.0.1 ---- 10.84.0.2 eth0  second
    first  eth1 10.84.1.1 ---- 10.84.1.2 eth1  second

Needs root. The namespaces are deleted at the end of the `with` block.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NET = "10.84"


@dataclass(frozen=True)
class Machines:
    names: tuple[str, str]

    def inside(self, node: int) -> list[str]:
        """The prefix that makes a command run on this machine."""
        return ["ip", "netns", "exec", self.names[node]]

    def cut(self, cable: int) -> None:
        """Take the carrier from both ends. The processes get no other notice."""
        _ip("-n", self.names[1], "link", "set", f"eth{cable}", "down")

    def address(self, node: int, cable: int) -> str:
        return f"{NET}.{cable}.{node + 1}"


@contextmanager
def two_machines() -> Iterator[Machines | None]:
    """None if network namespaces cannot be created."""
    tag = os.getpid()
    made = Machines((f"taskd-first-{tag}", f"taskd-second-{tag}"))
    try:
        yield made if _possible() and _wired(made, tag) else None
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _possible() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def _wired(machines: Machines, tag: int) -> bool:
    try:
        for name in machines.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for cable in (0, 1):
            ends = f"tk{cable}a{tag}", f"tk{cable}b{tag}"
            _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for node, (name, end) in enumerate(zip(machines.names, ends, strict=True)):
                _ip("link", "set", end, "netns", name, "name", f"eth{cable}")
                address = f"{machines.address(node, cable)}/24"
                _ip("-n", name, "addr", "add", address, "dev", f"eth{cable}")
                _ip("-n", name, "link", "set", f"eth{cable}", "up")
    except subprocess.CalledProcessError:
        return False
    return True


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)
