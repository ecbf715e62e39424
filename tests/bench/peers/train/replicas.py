"""The job for torchft: each rank is a replica group of one process, with its own torchrun.

Groups beyond the number of ranks are spares: they compute along, but their gradients do not count.
This follows torchft's DDP example: its DistributedDataParallel and Optimizer wrap ours, its manager
calls functions to save and load state when a replica returns, and gradients use its gloo group.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.manager import WorldSizeMode

from tests.bench.peers.workload import (
    STEPS,
    WORLD,
    StepWriter,
    build_model,
    build_optimizer,
    train_step,
)

GROUP_LIMIT = timedelta(seconds=5)
"""As in torchft's example for gloo."""


def main() -> None:
    replica = int(os.environ["REPLICA_GROUP_ID"])
    spares = int(os.environ["NUM_REPLICA_GROUPS"]) > WORLD
    log = StepWriter()
    plain = build_model()
    inner = build_optimizer(plain)

    def state() -> dict[str, object]:
        return {"model": plain.state_dict(), "optimizer": inner.state_dict()}

    def load(saved: dict[str, dict[str, object]]) -> None:
        plain.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=GROUP_LIMIT),
        min_replica_size=WORLD if spares else 1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if spares else WorldSizeMode.DYNAMIC,
        load_state_dict=load,
        state_dict=state,
        replica_id=f"replica_{replica}",
        init_sync=False,  # every replica builds the same weights
    )
    model = DistributedDataParallel(manager, plain)
    optimizer = Optimizer(manager, inner)
    while (step := manager.current_step()) < STEPS:
        train_step(model, optimizer, step, replica)
        if manager.current_step() > step:  # committed, not abandoned
            rank = manager.participating_rank()
            log.done(WORLD if rank is None else rank, step, manager.num_participants())


if __name__ == "__main__":
    main()
