"""Threads that call back into Python keep what Python knows about them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from taskd.torch.groups.foreign_threads import keep_state

COLLECTIVES = 50


def run(keep: bool) -> tuple[int, int]:
    """Callbacks in gloo's threads, and how many of these looked like a new thread to Python."""
    store = HashStore()

    def join(rank: int) -> Any:
        return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(minutes=1))

    with ThreadPoolExecutor() as pool:
        group, peer = pool.map(join, range(2))
    seen, calls, new = threading.local(), list[bool](), list[bool]()

    def called(_: object) -> None:
        if keep:
            keep_state()
        calls.append(True)
        if not hasattr(seen, "before"):
            seen.before = True
            new.append(True)

    for _ in range(COLLECTIVES):
        called_back = group.allreduce([torch.zeros(8)]).get_future().then(called)
        peer.allreduce([torch.zeros(8)]).wait()  # not before: the callback is in gloo's thread
        called_back.wait()
    return len(calls), len(new)


def test_state_of_a_thread_is_found_again_in_its_next_callback() -> None:
    calls, new = run(keep=False)
    assert calls == new > 0
    calls, new = run(keep=True)
    assert calls > 0
    assert new <= 2, "gloo has two threads"
