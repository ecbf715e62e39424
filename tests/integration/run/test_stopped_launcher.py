"""A launcher that does not run for a while, as on a suspended machine: its job trains on."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

from taskd.runtime.clock import monotonic
from tests.integration.run.run_job import DEADLINE_S, Job, script

STEPS_STOPPED = 45
"""At four steps per second, more than ten seconds: node silence is reported after three."""
TRAIN = """
import time
from pathlib import Path
import torch
import taskd.torch as taskd

job = taskd.init("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(100_000):
    with step:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    time.sleep(0.25)
    if job.rank == 0:
        Path("reached").write_text(str(int(step)))
    ending = torch.tensor(float(Path("end").exists()))
    torch.distributed.all_reduce(ending)
    if ending:
        break
print("trained", job.rank, flush=True)
"""


def wait_for_step(folder: Path, wanted: int) -> int:
    """Wait until rank 0 has reached it. Returns the step that it has reached."""
    deadline = monotonic() + DEADLINE_S
    while monotonic() < deadline:
        text = (folder / "reached").read_text() if (folder / "reached").exists() else ""
        if text and int(text) >= wanted:
            return int(text)
        threading.Event().wait(0.05)
    raise AssertionError(f"step {wanted} was not reached: training has stopped")


def test_job_trains_on_while_its_launcher_is_stopped(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN))
    reached = wait_for_step(tmp_path, 3)
    job.signal(signal.SIGSTOP)
    try:
        reached = wait_for_step(tmp_path, reached + STEPS_STOPPED)
    finally:
        job.signal(signal.SIGCONT)
    wait_for_step(tmp_path, reached + 10)
    (tmp_path / "end").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
    assert ended.out.count("trained") == 2
    assert "incident" not in ended.err, ended.err
