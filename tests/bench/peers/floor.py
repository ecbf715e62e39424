"""The yardstick: recovery without a restart in plain PyTorch, with a warm spare.

No detection protocol, no decision, no protection of the step: this process sees the death at once
(pidfd), writes one line to each rank, and train/survivors.py does the rest. What it takes is what
groups, state and one step cost on this machine, and nothing that recovers can be much faster.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

from torch._C._distributed_c10d import TCPStore

from tests.bench.peers.trial import (
    ROOT,
    VICTIM,
    Outcome,
    Trial,
    TrialError,
    train_until_warm,
    watch,
)
from tests.bench.peers.workload import WORLD

DEATH_LIMIT_MS = 10_000


def trial() -> Outcome:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Trial() as job:
        orders = [_start(job, store.port, f"process{index}") for index in range(WORLD + 1)]
        spare = orders.pop()
        for rank, pipe in enumerate(orders):
            os.write(pipe, f"0 {rank}\n".encode())
        before = train_until_warm(job)
        victim = os.pidfd_open(before[VICTIM].pid)
        kill_ns = time.monotonic_ns()
        os.kill(before[VICTIM].pid, signal.SIGKILL)
        death = select.poll()
        death.register(victim, select.POLLIN)
        if not death.poll(DEATH_LIMIT_MS):
            raise TrialError("the killed rank did not die")
        orders[VICTIM] = spare
        for rank, pipe in enumerate(orders):
            os.write(pipe, f"1 {rank}\n".encode())
        return watch(job, kill_ns, before)


def _start(job: Trial, store_port: int, name: str) -> int:
    """A process that waits for its first line on the pipe whose writing end is returned."""
    reading, writing = os.pipe()
    script = ROOT / "tests/bench/peers/train/survivors.py"
    job.start(
        [sys.executable, script, str(store_port), str(reading)], name=name, pass_fds=[reading]
    )
    os.close(reading)
    return writing
