"""The real group under a resilient one: gloo, NCCL or a plugin's, for the length of one incident.

`group.py` owns one at a time. It is formed at a meeting, aborted from another thread within
milliseconds, and then thrown away; it is never repaired.
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
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, _DistributedBackendOptions
from torch.distributed import distributed_c10d as c10d

from taskd import config
from taskd.torch.groups import sockets
from taskd.torch.operations import interfaces as nic


@dataclass(frozen=True, slots=True)
class Shape:
    """Who meets, under which name, over what."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    timeout: timedelta
    backends: Mapping[str, str]
    """Device type to backend: {"cpu": "gloo", "cuda": "nccl"}."""

    @property
    def size(self) -> int:
        return len(self.ranks)


class Transport:
    """One inner process group, from its forming to its end."""

    def __init__(self, shape: Shape, store: Store) -> None:
        self._shape = shape
        self._store = PrefixStore(f"{shape.name}/", store)
        self._known = sockets.inodes()
        self._peers: frozenset[int] = frozenset()
        self._backends: dict[str, Any] = {}
        self._aborting: list[threading.Thread] = []
        self._buried = False
        self._lock = threading.Lock()
        self.inner = dist.ProcessGroup(self._store, shape.rank, shape.size)

    def form(self) -> None:
        """Meet the others. Blocks until all are there, the timeout, or `abort`."""
        shape = self._shape
        for kind in dict.fromkeys(shape.backends.values()):
            self._backends[kind] = _create(kind, shape, self._store)
        for device, kind in shape.backends.items():
            self.inner._register_backend(torch.device(device), _type(kind), self._backends[kind])
        self.inner._set_default_backend(_type(next(iter(shape.backends.values()))))
        self.inner._set_group_name(c10d.GroupName(shape.name))
        self.inner._set_group_desc("taskd")
        if "gloo" in self._backends and shape.size > 1:
            self._peers = self._exchange_ports()
            if nic.chosen().name:
                self._watch()

    def _watch(self) -> None:
        """A link that is cut says nothing: have the kernel ask, so that the collective fails."""
        for one in sockets.scan(self._known):
            if not one.listening:
                sockets.watch(one)

    def abort(self) -> None:
        """Free whoever waits in this group. Safe from any thread, at any time, and twice."""
        with self._lock:
            if not self._buried:
                self._cut_off()

    def _cut_off(self) -> None:
        found = sockets.scan(self._known)
        own = {one.port for one in found if one.listening}
        for one in found:
            if not one.listening and (one.port in own or one.peer_port in self._peers):
                sockets.cut(one)
        if not self._aborting:
            self._aborting = [
                threading.Thread(target=backend.abort, name="taskd-abort", daemon=True)
                for kind, backend in self._backends.items()
                if kind != "gloo" and hasattr(backend, "abort")
            ]
            # NCCL frees the device at once, but takes a second to come back.
            for thread in self._aborting:
                thread.start()

    def problem(self) -> str:
        """What a library that works on a device has noticed and told nobody."""
        for kind, backend in self._backends.items():
            if kind != "gloo" and hasattr(backend, "get_error"):
                error = backend.get_error()
                if error.name != "SUCCESS":
                    return f"{kind}: {error.name}"
        return ""

    def bury(self, at_rest: bool) -> None:
        """Let go of it aside: gloo's end takes about 10 ms, in which a new group can be formed.

        When a thread of gloo's sleeps for good, its group must never end: it would wait for it.
        """
        with self._lock:
            self._buried = True  # sockets that come from now on are another's
        remains = [self.inner, *self._backends.values()]
        del self.inner
        self._backends = {}
        if not at_rest:
            for one in remains:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
            return

        def let_go() -> None:
            for one in self._aborting:
                one.join()
            remains.clear()

        # An abort may take long; the process need not wait for it to end.
        daemon = bool(self._aborting)
        threading.Thread(target=let_go, name="taskd-bury", daemon=daemon).start()

    def _exchange_ports(self) -> frozenset[int]:
        """Tell the peers where we listen, so that each knows which sockets are the group's."""
        ports = [one.port for one in sockets.scan(self._known) if one.listening]
        mine = ",".join(map(str, ports))
        self._store.set(f"ports/{self._shape.rank}", mine)
        keys = [f"ports/{rank}" for rank in range(self._shape.size)]
        told = b",".join(self._store.multi_get(keys)).decode()
        return frozenset(int(port) for port in told.split(",") if port)


class Splittable:
    """NCCL as torch sees it where it would split communicators, also before there is one.

    Ours are formed at the meeting, each for itself: nobody has to take part but its members.
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
        """Who is not in the new group need not be there."""


def choose(backend: str | None) -> dict[str, str]:
    """Which backend serves which device: what the user said, or what the machine has."""
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if _has_nccl() else "gloo"
    if ":" in backend:
        pairs = (part.split(":", 1) for part in backend.split(","))
        return {device.strip(): kind.strip().lower() for device, kind in pairs}
    kind = backend.lower()
    if kind == "gloo":
        return {"cpu": "gloo", "cuda": "gloo"} if torch.cuda.is_available() else {"cpu": "gloo"}
    return {device: kind for device in c10d.Backend.backend_capability.get(kind, ["cuda"])}


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def _type(kind: str) -> Any:
    return c10d.Backend.backend_type_map.get(kind, dist.ProcessGroup.BackendType.CUSTOM)


def _create(kind: str, shape: Shape, store: Store) -> Any:
    store = PrefixStore(f"{kind}/", store)
    if kind == "gloo":
        told: Any = nic.gloo_options(shape.timeout) or shape.timeout
        gloo = dist.ProcessGroupGloo(store, shape.rank, shape.size, told)
        gloo.options.global_ranks_in_group = list(shape.ranks)
        gloo.options.group_name = c10d.GroupName(shape.name)
        gloo._set_sequence_number_for_group()
        return gloo
    if kind == "nccl":
        config.keep_alive_under_nccl()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = shape.timeout
        options.global_ranks_in_group = list(shape.ranks)
        options.group_name = c10d.GroupName(shape.name)
        nccl = dist.ProcessGroupNCCL(store, shape.rank, shape.size, options)
        nccl._set_sequence_number_for_group()
        return nccl
    return _plugin(kind, shape, store)


def _plugin(kind: str, shape: Shape, store: Store) -> Any:
    """A backend that another package has registered, such as HCCL of torch_npu."""
    plugin = c10d.Backend._plugins[kind.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, shape.rank, shape.size, shape.timeout)
    told = _DistributedBackendOptions()
    told.store = store
    told.group_rank, told.group_size = shape.rank, shape.size
    told.timeout, told.group_id = shape.timeout, shape.name
    told.global_ranks_in_group = list(shape.ranks)
    return plugin.creator_fn(told, None)


def alone(backends: Sequence[str]) -> dist.ProcessGroup:
    """An inner group of one, for questions about capabilities before the peers are met."""
    store = HashStore()
    inner = dist.ProcessGroup(store, 0, 1)
    gloo = dist.ProcessGroupGloo(store, 0, 1, timeout=timedelta(minutes=1))
    for device in backends:
        inner._register_backend(torch.device(device), _type("gloo"), gloo)
    inner._set_default_backend(_type("gloo"))
    return inner
