"""The floor: recovery without a restart in plain PyTorch, with a warm spare.

No detection protocol, no decision, no protection of the step: this process detects the death at
once (pidfd) and writes one line to each rank; train/survivors.py does the rest. The time is that of
groups, state and one step on this machine. No recovery can be much faster.

The spare has built the model before the fault. A system that runs the script of a lost rank again
cannot: `builds_late` gives the floor for it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

from tests import ROOT
from tests.bench.peers.train.survivors import LATE
from tests.bench.peers.trial import (
    VICTIM,
    Outcome,
    Trial,
    TrialError,
    train_until_warm,
    watch,
)
from tests.bench.peers.workload import WORLD

DEATH_LIMIT_MS = 10_000


def trial(builds_late: bool = False) -> Outcome:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Trial() as job:
        orders = [_start(job, store.port, f"process{index}") for index in range(WORLD)]
        spare = _start(job, store.port, "spare", *([LATE] if builds_late else []))
        for rank, pipe in enumerate(orders):
            os.write(pipe, f"0 {rank}\n".encode())
        before = train_until_warm(job)
        victim = os.pidfd_open(before[VICTIM].pid)
        kill_ns = time.monotonic_ns()
        os.kill(before[VICTIM].pid, signal.SIGKILL)
        death = select.poll()
        death.register(victim, select.POLLIN)
        if not death.poll(DEATH_LIMIT_MS):
            raise TrialError("the killed rank did not exit")
        orders[VICTIM] = spare
        for rank, pipe in enumerate(orders):
            os.write(pipe, f"1 {rank}\n".encode())
        return watch(job, kill_ns, before)


def _start(job: Trial, store_port: int, name: str, *words: str) -> int:
    """Start a process that waits for lines on a pipe; return the writing end of the pipe."""
    reading, writing = os.pipe()
    script = ROOT / "tests/bench/peers/train/survivors.py"
    command: list[str | Path] = [sys.executable, script, str(store_port), str(reading), *words]
    job.start(command, name=name, pass_fds=[reading])
    os.close(reading)
    return writing
