"""The job with taskd: the same model and data, plus the few lines that protect it.

On SIGUSR2 the rank loses its links to the other ranks: the communication fault of the benchmark.
The connections to its agent and to the store stay.
"""

from __future__ import annotations

import os
import signal
import threading

from torch.nn.parallel import DistributedDataParallel as DDP

import taskd.torch as taskd
from tests.bench.peers.links import connections, cut
from tests.bench.peers.workload import (
    STEPS,
    StepWriter,
    build_model,
    build_optimizer,
    train_step,
)


def main() -> None:
    job = taskd.init("gloo")
    log = StepWriter()
    model = DDP(build_model())
    optimizer = build_optimizer(model)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            train_step(model, optimizer, step, job.rank)
            # An abandoned step does not get here.
            log.done(job.rank, step, len(job.members))


def cut_on_request() -> None:
    stay = {int(os.environ[name].rpartition(":")[2]) for name in ("TASKD_PROXY", "TASKD_STORE")}
    while signal.sigwait([signal.SIGUSR2]):
        cut(connections(except_to=stay))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # before any thread inherits
    threading.Thread(target=cut_on_request, daemon=True).start()
    main()
