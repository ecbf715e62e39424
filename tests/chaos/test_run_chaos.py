"""One job under `taskd run`; all processes around it are killed, one after another."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.run.run_job import DEADLINE_S, Job, run, script

STEPS = 160

PROTECTED = f"""
    import threading
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps({STEPS}):
        with step:
            model(torch.randn(4, 8) + job.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.02)
        if job.rank == 0:
            print("step", int(step), flush=True)
    print("weights", sum(p.double().sum().item() for p in model.parameters()), flush=True)
"""


def weights(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if "weights" in line)


def test_job_survives_kills_of_all_its_processes(tmp_path: Path) -> None:
    """Safety: the weights equal those of a run without faults. Progress: the job ends."""
    path = script(tmp_path, PROTECTED)
    undisturbed = run(tmp_path, "--nproc-per-node=3", path)
    assert undisturbed.code == 0, undisturbed.err
    job = Job(tmp_path, "--nproc-per-node=3", path)
    blows: list[Callable[[], psutil.Process]] = [
        lambda: job.worker(2),
        job.manager,
        lambda: job.worker(1),
        lambda: job.worker(0),
    ]
    for number, victim in enumerate(blows):
        job.wait_for(f"step {5 + 20 * number}")
        process = victim()
        process.kill()
        process.wait(DEADLINE_S)
    ended = job.end()
    assert ended.code == 0, ended.err
    seen = weights(ended.out)
    assert seen == weights(undisturbed.out)


@pytest.mark.parametrize("name", ["taskd:zygote", "taskd:store"])
def test_workers_without_taskd_survive_the_death_of_their_zygote(tmp_path: Path, name: str) -> None:
    path = script(
        tmp_path,
        """
        import os
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("up", flush=True)
        assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        open("go").read()
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    os.mkfifo(tmp_path / "go")
    job = Job(tmp_path, "--nproc-per-node=2", path)
    job.wait_for("up")
    job.wait_for("up")
    victim = next(p for p in job.family() if p.name() == name)
    os.kill(victim.pid, signal.SIGKILL)
    (tmp_path / "go").write_text("")
    (tmp_path / "go").unlink()
    (tmp_path / "go").touch()
    ended = job.end()
    assert ended.code == 0, ended.err
