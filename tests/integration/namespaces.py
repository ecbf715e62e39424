"""Two machines made of network namespaces, connected by two cables that can be cut.

    a  eth0 10.83.0.1 ---- 10.83.0.2 eth0  b      the primary link
    a  eth1 10.83.1.1 ---- 10.83.1.2 eth1  b      the backup link, and the control network

Needs root. The namespaces are always removed at the end, with everything in them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IP = "/usr/sbin/ip"
NET = "10.83"


@dataclass(frozen=True)
class Namespaces:
    a: str
    b: str

    def inside(self, where: str, *words: str) -> list[str]:
        """The command line that runs this command in that namespace."""
        return [IP, "netns", "exec", where, *words]

    def cut(self, cable: int) -> None:
        """Both ends lose their carrier, and nothing else happens."""
        _run(*self.inside(self.b, IP, "link", "set", f"eth{cable}", "down"))

    def join(self, cable: int) -> None:
        _run(*self.inside(self.b, IP, "link", "set", f"eth{cable}", "up"))

    def shape(self, cable: int, rate: str) -> None:
        """Limit this cable's rate in the direction from b to a."""
        words = ("tc", "qdisc", "add", "dev", f"eth{cable}", "root", "tbf")
        _run(*self.inside(self.b, *words, "rate", rate, "burst", "64kb", "latency", "400ms"))

    def address(self, where: str, cable: int) -> str:
        return f"{NET}.{cable}.{1 if where == self.a else 2}"


def possible() -> bool:
    if os.geteuid() != 0 or not os.path.exists(IP):
        return False
    probe = f"taskd-probe-{os.getpid()}"
    made = subprocess.run([IP, "netns", "add", probe], capture_output=True).returncode == 0
    if made:
        _run(IP, "netns", "delete", probe)
    return made


@contextmanager
def two_machines() -> Iterator[Namespaces]:
    tag = f"{os.getpid() % 100000}"
    spaces = Namespaces(f"taskd-a-{tag}", f"taskd-b-{tag}")
    try:
        for name in (spaces.a, spaces.b):
            _run(IP, "netns", "add", name)
            _run(*spaces.inside(name, IP, "link", "set", "lo", "up"))
        for cable in (0, 1):
            ends = f"tka{cable}{tag}", f"tkb{cable}{tag}"
            _run(IP, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for name, end in zip((spaces.a, spaces.b), ends, strict=True):
                _run(IP, "link", "set", end, "netns", name, "name", f"eth{cable}")
                address = f"{spaces.address(name, cable)}/24"
                _run(*spaces.inside(name, IP, "addr", "add", address, "dev", f"eth{cable}"))
                _run(*spaces.inside(name, IP, "link", "set", f"eth{cable}", "up"))
        yield spaces
    finally:
        for name in (spaces.a, spaces.b):
            subprocess.run([IP, "netns", "delete", name], capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Star:
    """Machines at one switch, and a hub that is connected to all of them, for servers."""

    hub: str
    nodes: tuple[str, ...]

    def inside(self, where: str, *words: str) -> list[str]:
        return [IP, "netns", "exec", where, *words]

    def address(self, node: int) -> str:
        return f"{NET}.9.{node + 1}"

    @property
    def hub_address(self) -> str:
        return f"{NET}.9.254"

    def cut(self, node: int) -> None:
        """The node's cable: its packets are lost, in both directions."""
        _run(*self.inside(self.nodes[node], IP, "link", "set", "eth0", "down"))


@contextmanager
def star(count: int) -> Iterator[Star]:
    tag = f"{os.getpid() % 100000}"
    made = Star(f"taskd-h-{tag}", tuple(f"taskd-{node}-{tag}" for node in range(count)))
    try:
        for name in (made.hub, *made.nodes):
            _run(IP, "netns", "add", name)
            _run(*made.inside(name, IP, "link", "set", "lo", "up"))
        inside_hub = made.inside(made.hub, IP)
        _run(*inside_hub, "link", "add", "br0", "type", "bridge")
        _run(*inside_hub, "addr", "add", f"{made.hub_address}/24", "dev", "br0")
        _run(*inside_hub, "link", "set", "br0", "up")
        for node, name in enumerate(made.nodes):
            ends = f"tkh{node}{tag}", f"tkn{node}{tag}"
            _run(IP, "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            _run(IP, "link", "set", ends[0], "netns", made.hub)
            _run(IP, "link", "set", ends[1], "netns", name, "name", "eth0")
            _run(*inside_hub, "link", "set", ends[0], "master", "br0", "up")
            address = f"{made.address(node)}/24"
            _run(*made.inside(name, IP, "addr", "add", address, "dev", "eth0"))
            _run(*made.inside(name, IP, "link", "set", "eth0", "up"))
        yield made
    finally:
        for name in (made.hub, *made.nodes):
            subprocess.run([IP, "netns", "delete", name], capture_output=True)
