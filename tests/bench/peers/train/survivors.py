"""The floor, inside a rank: what plain PyTorch can do at best when no healthy process is restarted.

Started by floor.py, four times as a rank and once as the spare. The driver writes one line to each
process's order pipe: `<incident> <rank>`. A rank that is training then cuts the sockets of its group, so
that its blocked collective fails at once; the spare has been waiting for that line with everything
imported, built and warmed. All of them meet under a new prefix in the store, the rank that is furthest
broadcasts its weights and optimizer state, and training goes on.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.bench.peers.workload import (
    STEPS,
    WORLD,
    StepWriter,
    build_model,
    build_optimizer,
    loss,
)

LIMIT = timedelta(seconds=30)


class Group:
    """The gloo group of one incident, and the knife that ends it while a collective is blocked in it."""

    def __init__(self, store: dist.Store, incident: int, rank: int) -> None:
        others = set(_connected())
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(incident), store),
            rank=rank,
            world_size=WORLD,
            timeout=LIMIT,
        )
        self._sockets = [fd for fd in _connected() if fd not in others]

    def cut(self) -> None:
        """From another thread. Connected sockets only: gloo dies of a broken listening socket.

        Gloo closes the link to the dead rank by itself, hence the suppressed errors; nothing opens a new
        descriptor in between, because the training thread waits for the order that follows the cut.
        """
        for fd in self._sockets:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as link:
                link.shutdown(socket.SHUT_RDWR)


class Orders:
    """A thread that reads the driver's lines and cuts the group that the line makes obsolete."""

    def __init__(self, pipe: int) -> None:
        self.group: Group | None = None
        self._orders: SimpleQueue[tuple[int, int]] = SimpleQueue()
        threading.Thread(target=self._read, args=(pipe,), daemon=True).start()

    def next(self) -> tuple[int, int]:
        return self._orders.get()

    def _read(self, pipe: int) -> None:
        for line in os.fdopen(pipe):
            incident, rank = map(int, line.split())
            if self.group is not None:
                self.group.cut()
            self._orders.put((incident, rank))


def main(store_port: int, orders: Orders) -> None:
    log = StepWriter()
    model = build_model()
    optimizer = build_optimizer(model)
    warm(model, optimizer)
    step = 0
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=LIMIT)
    while True:
        incident, rank = orders.next()
        orders.group = Group(store, incident, rank)
        step = share(model, optimizer, step)
        ddp = DDP(model, init_sync=False)
        try:
            while step < STEPS:
                optimizer.zero_grad()
                loss(ddp, step, rank).backward()
                optimizer.step()
                log.done(rank, step)
                step += 1
        except (
            RuntimeError
        ):  # the group was cut, or a peer's death was seen before the driver's line
            del ddp
            dist.destroy_process_group()


def warm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step that changes nothing: optimizer state exists, and every lazy import has happened."""
    for group in optimizer.param_groups:
        group["lr"], rate = 0.0, group["lr"]
        loss(model, 0, 0).backward()
        optimizer.step()
        group["lr"] = rate
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


def share(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Everybody gets the weights and optimizer state of the rank that has done the most steps."""
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(WORLD)]
    dist.all_gather(steps, torch.tensor([step]))
    reached = [int(each) for each in steps]
    newest = max(reached)
    tensors: list[Tensor] = [each.data for each in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.broadcast(flat, src=reached.index(newest))
    if step < newest:
        parts = flat.split([each.numel() for each in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return newest


def _connected() -> list[int]:
    """The descriptors of this process that are TCP connections."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as link:
                link.getpeername()
            found.append(fd)
        except OSError:
            continue  # the listing's own descriptor, or a socket that only listens
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), Orders(int(sys.argv[2])))
