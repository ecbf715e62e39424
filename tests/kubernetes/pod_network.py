"""The network of the test nodes: one namespace per pod, all on one switch, and names of Services.

The switch is a bridge in a namespace of its own, so nothing of the machine's network changes. There
is no kube-proxy: the name of a Service stands for the pods behind it. Needs root.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.kubernetes.control_plane import ControlPlane, Json
from tests.kubernetes.watching import Watcher

NETWORK = "10.86"
CLONE_NEWNET = 0x40000000
NAMES = itertools.count()
T = TypeVar("T")


@dataclass(frozen=True)
class PodAddress:
    network: str
    """The name of the network namespace."""
    ip: str

    @property
    def path(self) -> Path:
        return Path("/run/netns") / self.network


class PodNetwork:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._tag = f"{os.getpid()}-{next(NAMES)}"
        self._switch = f"taskd-switch-{self._tag}"
        self._count = itertools.count(1)
        self._lock = threading.Lock()
        self._made: dict[str, socket.socket] = {}
        self._hosts: dict[Path, tuple[str, str]] = {}
        self._endpoints: dict[tuple[str, str], Json] = {}
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "switch", "up")
        self._watcher = Watcher(plane, "api/v1/endpoints", self._endpoints_changed)

    def attach(self) -> PodAddress:
        """A new namespace with an address of its own, from which the API server can be reached."""
        with self._lock:
            number = next(self._count)
            made = PodAddress(f"taskd-pod-{self._tag}-{number}", f"{NETWORK}.0.{number}")
            cable = f"tk{os.getpid() % 100000}p{number}"
            _ip("netns", "add", made.network)
            _ip("-n", made.network, "link", "set", "lo", "up")
            _ip("-n", self._switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0",
                "netns", made.network)  # fmt: skip
            _ip("-n", self._switch, "link", "set", cable, "master", "switch", "up")
            _ip("-n", made.network, "addr", "add", f"{made.ip}/16", "dev", "eth0")
            _ip("-n", made.network, "link", "set", "eth0", "up")
            self._made[made.network] = self._forward(made, self._plane.port)
        return made

    def detach(self, address: PodAddress) -> None:
        with self._lock:
            listener = self._made.pop(address.network, None)
        if listener is not None:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            _ip("netns", "delete", address.network)

    def close(self) -> None:
        self._watcher.stop()
        for network in list(self._made):
            self.detach(PodAddress(network, ""))
        _ip("netns", "delete", self._switch)

    # The API server, which listens on the loopback device of the machine

    def _forward(self, address: PodAddress, port: int) -> socket.socket:
        listener = inside(address, lambda: socket.create_server(("127.0.0.1", port)))

        def accept() -> None:
            while True:
                try:
                    accepted, _ = listener.accept()
                    upstream = socket.create_connection(("127.0.0.1", port))
                except ConnectionRefusedError:
                    accepted.close()
                except OSError:  # closed by `detach`
                    return
                else:
                    for one, other in ((accepted, upstream), (upstream, accepted)):
                        threading.Thread(target=_copy, args=(one, other), daemon=True).start()

        threading.Thread(target=accept, name=f"forward {address.network}", daemon=True).start()
        return listener

    # Names

    def hosts(self, path: Path, namespace: str, own: str) -> None:
        """Keep this file as the /etc/hosts of a pod in that namespace."""
        with self._lock:
            self._hosts[path] = namespace, own
            self._write(path)

    def forget(self, path: Path) -> None:
        with self._lock:
            self._hosts.pop(path, None)

    def _endpoints_changed(self, body: Json, gone: bool) -> None:
        key = body["metadata"]["namespace"], body["metadata"]["name"]
        with self._lock:
            self._endpoints[key] = {} if gone else body
            for path in self._hosts:
                self._write(path)

    def _write(self, path: Path) -> None:
        """In place: the file is mounted into the pod."""
        namespace, own = self._hosts[path]
        lines = ["127.0.0.1 localhost", own]
        for (where, service), body in self._endpoints.items():
            for subset in body.get("subsets") or ():
                for address in subset.get("addresses") or ():
                    lines.append(f"{address['ip']} {_names(service, where, namespace, address)}")
        text = ("\n".join(lines) + "\n").encode()
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(opened, text, 0)
            os.ftruncate(opened, len(text))
        finally:
            os.close(opened)


def _names(service: str, where: str, namespace: str, address: Json) -> str:
    """Of a pod with a name of its own no other: some resolvers (c-ares, in gRPC) take two lines
    with one common name for the same host."""
    base = f"{address['hostname']}.{service}" if "hostname" in address else service
    suffixes = [f".{where}", f".{where}.svc", f".{where}.svc.cluster.local"]
    suffixes += [""] if where == namespace else []
    return " ".join(f"{base}{suffix}" for suffix in suffixes)


def inside(address: PodAddress, act: Callable[[], T]) -> T:
    """Do something in the network of a pod, in a thread of its own."""
    found: list[T] = []
    failed: list[OSError] = []

    def enter() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            with address.path.open("rb") as network:
                if libc.setns(network.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {address.network}")
            found.append(act())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(65536):
            target.sendall(block)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
