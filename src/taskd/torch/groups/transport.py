"""The real group under a resilient one: gloo, NCCL or a plugin's, for the length of one incident.

`resilient_group.py` owns one at a time. It is formed at a rendezvous, aborted from another thread
within milliseconds, and then thrown away; it is never repaired.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from taskd import config
from taskd.torch import compat
from taskd.torch.groups import sockets
from taskd.torch.operations import interfaces

DISCARD_THREAD = "taskd-discard"


@dataclass(frozen=True, slots=True)
class Shape:
    """Which ranks form the group, under which name, over which backends."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout: timedelta
    backends: Mapping[str, str]
    """Device type to backend: {"cpu": "gloo", "cuda": "nccl"}."""

    @property
    def size(self) -> int:
        return len(self.ranks)


def wait_for_discarded(timeout_s: float) -> None:
    """Wait until groups that are being destroyed are gone."""
    for thread in threading.enumerate():
        if thread.name == DISCARD_THREAD:
            thread.join(timeout_s)


class Transport:
    """One inner process group, from its forming to its end."""

    def __init__(self, shape: Shape, store: Store) -> None:
        self._shape = shape
        self._store = PrefixStore(f"{shape.name}/", store)
        self._older_sockets = sockets.inodes()
        self._peer_ports: frozenset[int] = frozenset()
        self._backends: dict[str, Any] = {}
        self._aborting: list[threading.Thread] = []
        self._is_discarded = False
        self._lock = threading.Lock()
        self.inner = dist.ProcessGroup(self._store, shape.rank, shape.size)

    def form(self) -> None:
        """Connect to the peers. Blocks until all are there, the timeout, or `abort`."""
        shape = self._shape
        for kind in dict.fromkeys(shape.backends.values()):
            self._backends[kind] = _create(kind, shape, self._store)
        for device, kind in shape.backends.items():
            compat.register_backend(
                self.inner, torch.device(device), compat.backend_type(kind), self._backends[kind]
            )
        default = compat.backend_type(next(iter(shape.backends.values())))
        compat.set_default_backend(self.inner, default)
        compat.name_group(self.inner, shape.name, "taskd")
        if "gloo" in self._backends and shape.size > 1:
            self._peer_ports = self._exchange_ports()
            if interfaces.current().name:
                self._enable_keepalive()

    def _enable_keepalive(self) -> None:
        """A cut link reports nothing: let the kernel probe it, so that the collective fails."""
        for one in sockets.scan(self._older_sockets):
            if not one.listening:
                sockets.enable_keepalive(one)

    def abort(self) -> None:
        """Free every thread that waits in this group. Safe from any thread, and twice."""
        with self._lock:
            if not self._is_discarded:
                self._abort()

    def _abort(self) -> None:
        found = sockets.scan(self._older_sockets)
        own_ports = {one.port for one in found if one.listening}
        for one in found:
            if not one.listening and (one.port in own_ports or one.peer_port in self._peer_ports):
                sockets.shut_down(one)
        if not self._aborting:
            self._aborting = [
                threading.Thread(target=backend.abort, name="taskd-abort", daemon=True)
                for kind, backend in self._backends.items()
                if kind != "gloo" and hasattr(backend, "abort")
            ]
            # NCCL frees the device at once, but its abort takes a second to return.
            for thread in self._aborting:
                thread.start()

    def device_error(self) -> str:
        """An error that a device library has noticed and not raised; empty: none."""
        for kind, backend in self._backends.items():
            if kind != "gloo" and hasattr(backend, "get_error"):
                error = backend.get_error()
                if error.name != "SUCCESS":
                    return f"{kind}: {error.name}"
        return ""

    def discard(self, idle: bool) -> None:
        """Destroy it in a thread: gloo's end takes about 10 ms, and a new group can form meanwhile.

        `idle` is False when a thread of gloo sleeps forever. Its group must then never be
        destroyed: the destructor would wait for that thread.
        """
        with self._lock:
            self._is_discarded = True  # sockets that are opened from now on are not the group's
        remains = [self.inner, *self._backends.values()]
        del self.inner
        self._backends = {}
        if not idle:
            for one in remains:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            return

        def destroy() -> None:
            for one in self._aborting:
                one.join()
            remains.clear()

        # An abort may take long; the process need not wait for it to end.
        daemon = bool(self._aborting)
        thread = threading.Thread(target=destroy, name=DISCARD_THREAD, daemon=daemon)
        try:
            thread.start()
        except RuntimeError:  # newer Pythons start no thread while the interpreter shuts down
            destroy()

    def _exchange_ports(self) -> frozenset[int]:
        """Tell the peers where we listen, so that each knows which sockets belong to the group."""
        ports = [one.port for one in sockets.scan(self._older_sockets) if one.listening]
        self._store.set(f"ports/{self._shape.rank}", ",".join(map(str, ports)))
        keys = [f"ports/{rank}" for rank in range(self._shape.size)]
        published = b",".join(self._store.multi_get(keys)).decode()
        return frozenset(int(port) for port in published.split(",") if port)


class SplittableNccl:
    """NCCL as torch wants to see it before it splits communicators, also before there is one.

    Our groups are formed at the rendezvous, each by itself: only its members take part.
    """

    supports_splitting = supports_coalescing = True
    options = None

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """It connects when it is first used, as after every repair."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """A rank that is not in the new group need not take part."""


def choose_backends(backend: str | None) -> dict[str, str]:
    """The backend for each device type: what the user asked for, or what the machine has."""
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if _has_nccl() else "gloo"
    if ":" in backend:
        pairs = (part.split(":", 1) for part in backend.split(","))
        return {device.strip(): kind.strip().lower() for device, kind in pairs}
    kind = backend.lower()
    if kind == "gloo":
        return {"cpu": "gloo", "cuda": "gloo"} if torch.cuda.is_available() else {"cpu": "gloo"}
    return {device: kind for device in c10d.Backend.backend_capability.get(kind, ["cuda"])}


def solo_group(devices: Sequence[str]) -> dist.ProcessGroup:
    """An inner group of one rank, for questions about capabilities before the peers are met."""
    store = HashStore()
    inner = dist.ProcessGroup(store, 0, 1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(minutes=1))
    kind = compat.backend_type("gloo")
    for device in devices:
        compat.register_backend(inner, torch.device(device), kind, gloo)
    compat.set_default_backend(inner, kind)
    return inner


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _create(kind: str, shape: Shape, store: Store) -> Any:
    store = PrefixStore(f"{kind}/", store)
    if kind == "gloo":
        options: Any = interfaces.gloo_options(shape.timeout) or shape.timeout
        gloo: Any = dist.ProcessGroupGloo(store, shape.rank, shape.size, options)
        gloo.options.global_ranks_in_group = list(shape.ranks)
        gloo.options.group_name = shape.name
        compat.start_sequence(gloo)
        return gloo
    if kind == "nccl":
        config.keep_alive_under_nccl()
        options = compat.nccl_options(shape.timeout)
        options.global_ranks_in_group = list(shape.ranks)
        options.group_name = shape.name
        nccl = dist.ProcessGroupNCCL(store, shape.rank, shape.size, options)
        compat.start_sequence(nccl)
        return nccl
    return _create_plugin(kind, shape, store)


def _create_plugin(kind: str, shape: Shape, store: Store) -> Any:
    """A backend that another package has registered, such as HCCL of torch_npu."""
    plugin = compat.plugins()[kind.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, shape.rank, shape.size, shape.timeout)
    options = compat.backend_options()
    options.store = store
    options.group_rank, options.group_size = shape.rank, shape.size
    options.timeout, options.group_id = shape.timeout, shape.name
    options.global_ranks_in_group = list(shape.ranks)
    return plugin.creator_fn(options, None)
