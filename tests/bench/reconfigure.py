"""Our way to replace a rank in a gloo group against torch's own (`_reconfigure`, torch 2.14).

Four ranks, one of which is killed while the others wait in an all-reduce. A fresh process stands
ready in its place. Trials of both ways alternate.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from taskd.torch.groups.store import Rendezvous
from taskd.torch.groups.transport import Shape, Transport
from tests.bench.rows import Row, ms

RANKS, VICTIM, TRIALS = 4, 1, 7
LIMIT = timedelta(seconds=60)
OURS, TORCHS = "ours", "torch's"
PARTS = (
    "a rank is killed: the blocked calls of the others return",
    "the same: the group is formed again",
    "the same: the next all-reduce has the right sum",
)


def measure() -> list[Row]:
    if not is_supported():
        return []
    times: dict[str, list[tuple[float, ...]]] = {OURS: [], TORCHS: []}
    for _ in range(TRIALS):
        for way, found in times.items():
            found.append(_trial(way))
    rows = []
    for part, what in enumerate(PARTS):
        ours, theirs = ([trial[part] for trial in times[way]] for way in (OURS, TORCHS))
        ratio = median(ours) / median(theirs)
        rows.append(Row(what, ms(ours), f"{ms(theirs)} with torch's `_reconfigure`", ratio))
    return rows


def is_supported() -> bool:
    return hasattr(dist.ProcessGroupGloo, "reconfigure")


def _trial(way: str) -> tuple[float, ...]:
    """Seconds from the kill to each part, in the slowest rank."""
    store = TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    results: Any = context.Queue()
    members = [
        context.Process(target=_member, args=(way, rank, store.port, results))
        for rank in range(RANKS)
    ]
    fresh = context.Process(target=_fresh_member, args=(way, store.port, results))
    for process in (*members, fresh):
        process.start()
    store.wait(["fresh", *(f"blocked/{rank}" for rank in range(RANKS))], LIMIT)
    began, pid = _now(), members[VICTIM].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    store.set("killed", "1")
    times = [results.get(timeout=LIMIT.seconds) for _ in range(RANKS)]
    store.set("done", "1")
    for process in (*members, fresh):
        process.join(LIMIT.seconds)
    return tuple(max(part) - began for part in zip(*times, strict=True))


def _member(way: str, rank: int, port: int, results: Any) -> None:
    group = _GROUPS[way](rank, port)
    group.form(0)
    group.reduce()
    control = _connect(port)
    freed: list[float] = []

    def wait_for_victim() -> None:
        try:
            group.reduce()
        except RuntimeError:
            freed.append(_now())

    if rank != VICTIM:
        waiting = threading.Thread(target=wait_for_victim)
        waiting.start()
    control.set(f"blocked/{rank}", "1")
    control.wait(["killed"], LIMIT)
    group.free(waiting)
    group.form(1)
    formed = _now()
    waiting.join()
    group.reduce()
    _report(control, results, freed[0], formed)


def _fresh_member(way: str, port: int, results: Any) -> None:
    group, control = _GROUPS[way](VICTIM, port), _connect(port)
    control.set("fresh", "1")
    control.wait(["killed"], LIMIT)
    group.form(1)
    formed = _now()
    group.reduce()
    _report(control, results, 0.0, formed)


def _report(control: TCPStore, results: Any, freed: float, formed: float) -> None:
    results.put((freed, formed, _now()))
    control.wait(["done"], LIMIT)
    results.close()
    results.join_thread()
    os._exit(0)  # gloo's threads may still wait for the victim


class _Group:
    def __init__(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.port = rank, port
        self.group: Any = None

    def reduce(self) -> None:
        tensor = torch.full((1000,), float(self.rank))
        self.group.allreduce([tensor]).wait()
        assert int(tensor[0]) == sum(range(RANKS))


class _OurGroup(_Group):
    def form(self, number: int) -> None:
        rendezvous = Rendezvous(f"127.0.0.1:{self.port}", f"{number}/", LIMIT)
        shape = Shape("world", tuple(range(RANKS)), self.rank, LIMIT, {"cpu": "gloo"})
        self.transport = Transport(shape, rendezvous.store)
        self.transport.form()
        self.group = self.transport.inner

    def free(self, waiting: threading.Thread) -> None:
        self.transport.abort()
        waiting.join()


class _TorchsGroup(_Group):
    def __init__(self, rank: int, port: int) -> None:
        super().__init__(rank, port)
        make: Any = dist.ProcessGroupGloo
        store = PrefixStore("group/", _connect(port))
        self.group = make(store, rank, RANKS, LIMIT, enable_reconfigure=True)
        self.handles = _connect(port)

    def form(self, number: int) -> None:
        self.handles.set(f"{number}/{self.rank}", self.group.get_reconfigure_handle())
        keys = [f"{number}/{rank}" for rank in range(RANKS)]
        options: Any = getattr(torch._C._distributed_c10d, "ReconfigureOptions")()  # noqa: B009
        options.uuid = number + 1
        options.handles = [handle.decode() for handle in self.handles.multi_get(keys)]
        options.timeout = LIMIT
        self.group.reconfigure(options).wait()

    def free(self, waiting: threading.Thread) -> None:
        """Forming the group again frees the thread."""


_GROUPS: dict[str, Callable[[int, int], Any]] = {OURS: _OurGroup, TORCHS: _TorchsGroup}


def _connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)
