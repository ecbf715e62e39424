"""The floor, inside a rank: the best that plain PyTorch can do without restarting healthy ranks.

floor.py starts it four times as a rank and once as the spare. The driver writes one line to the
pipe of each process: `<incident> <rank>`. A rank that is training then cuts the sockets of its
group, so that its blocked collective fails at once; the spare waits for that line with everything
imported, built and warmed up. All of them meet under a new prefix in the store, the rank that has
done the most steps broadcasts its weights and optimizer state, and training continues.

With the word LATE the process is warmed up with another model, and builds its own when it is
needed: a spare of any recovery system that runs the script only then has to do that.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.bench.peers.links import connections, cut
from tests.bench.peers.workload import (
    STEPS,
    WORLD,
    StepWriter,
    build_model,
    build_optimizer,
    train_step,
    warm,
)

LIMIT = timedelta(seconds=30)
LATE = "late"


class Group:
    """The gloo group of one incident; `cut` aborts a blocked collective."""

    def __init__(self, store: Store, incident: int, rank: int) -> None:
        others = connections()
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(incident), store),
            rank=rank,
            world_size=WORLD,
            timeout=LIMIT,
        )
        self._links = connections() - others

    def cut(self) -> None:
        cut(self._links)


class Orders:
    """A thread that reads the lines of the driver and cuts the group that each one replaces."""

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


def main(store_port: int, orders: Orders, is_late: bool) -> None:
    log = StepWriter()
    model = build_model()
    optimizer = build_optimizer(model)
    warm(model, optimizer)
    step = 0
    # Never destroyed: the last reference to a gloo group joins its threads while it holds the GIL,
    # and one of them may need the GIL to drop an abandoned collective: a deadlock.
    retired: list[DDP] = []
    store = TCPStore("127.0.0.1", store_port, is_master=False, timeout=LIMIT)
    while True:
        incident, rank = orders.next()
        if is_late:
            model, optimizer, is_late = *build_again(), False
        orders.group = Group(store, incident, rank)
        step = share(model, optimizer, step)
        ddp = DDP(model, init_sync=False)
        try:
            while step < STEPS:
                train_step(ddp, optimizer, step, rank)
                log.done(rank, step)
                step += 1
        except RuntimeError:  # cut, or gloo noticed the dead peer before the line arrived
            retired.append(ddp)
            dist.destroy_process_group()


def build_again() -> tuple[nn.Module, torch.optim.Optimizer]:
    """What the script builds, with room for the optimizer state that a peer sends."""
    model = build_model()
    optimizer = build_optimizer(model)
    for weight in model.parameters():
        optimizer.state[weight] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return model, optimizer


def share(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Give all ranks the weights and optimizer state of the rank that has done the most steps."""
    steps = [torch.zeros(1, dtype=torch.long) for _ in range(WORLD)]
    dist.all_gather(steps, torch.tensor([step]))
    reached = [int(each) for each in steps]
    newest = max(reached)
    tensors: list[Tensor] = [each.data for each in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    flat = torch.cat([each.reshape(-1) for each in tensors])
    dist.broadcast(flat, src=reached.index(newest))
    if step < newest:
        parts = torch.split(flat, [each.numel() for each in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
    return newest


if __name__ == "__main__":
    main(int(sys.argv[1]), Orders(int(sys.argv[2])), is_late=LATE in sys.argv[3:])
