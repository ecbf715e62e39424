"""The processes that serve a node's ranks are killed: ranks train on, the next fault heals."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.chaos.test_manager_kill import kill
from tests.integration.run.run_job import Job, script

TRAIN = """
    import os, threading

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    job = taskd.init()
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(100_000):
        with step:
            is_over = torch.tensor(float(os.path.exists("stop")))
            dist.all_reduce(is_over)
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.05)
        if job.rank == 0:
            print(f"step {int(step)} done", flush=True)
        if is_over:
            break
"""


def helper(job: Job, name: str) -> psutil.Process:
    return next(process for process in job.family() if process.name() == name)


def last_step(job: Job) -> int:
    return int(job.wait_for("step ")[-1].split()[-2])


@pytest.mark.parametrize("name", ["taskd:zygote", "taskd:store"])
def test_ranks_train_on_and_the_next_one_is_replaced(tmp_path: Path, name: str) -> None:
    job = Job(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN))
    job.wait_for("step 5 done")
    ranks = {job.worker(rank).pid for rank in range(2)}
    kill(helper(job, name))
    step = last_step(job)
    job.wait_for(f"step {step + 5} done")
    assert {job.worker(rank).pid for rank in range(2)} == ranks
    kill(job.worker(1))
    job.wait_for(f"step {last_step(job) + 5} done")
    (tmp_path / "stop").touch()
    ended = job.end()

    assert ended.code == 0, ended.err
    assert "1 fault:" in ended.err
    assert "restarted" not in ended.err
