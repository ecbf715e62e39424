"""After all ranks have restarted, nothing of the time before may come back."""

from __future__ import annotations

from pathlib import Path

from tests.integration.run.run_job import run, script

TRAIN = """
    import os, signal
    import torch
    import torch.distributed as dist
    import taskd.torch as taskd

    def die_once(rank, moment):
        if job.rank == rank and not os.path.exists(f"{moment}-{rank}"):
            open(f"{moment}-{rank}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    for step in job.steps(9):
        for attempt in step:
            with attempt:
                loss = model(torch.randn(4, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach().clone()
                dist.all_reduce(mean)  # after the update: the state is copied in each step
        print("step", job.rank, life, int(step), mean.item(), flush=True)
        if step == 6 and life == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and life == "1":
            die_once(1, "second")
"""


def test_copies_of_the_time_before_a_restart_are_not_used(tmp_path: Path) -> None:
    """The job is at step 4 again: it does not go on from the copies of step 7."""
    ended = run(tmp_path, "--nproc-per-node=2", script(tmp_path, TRAIN))
    assert ended.code == 0, ended.err
    assert "recovered" in ended.err, "the second fault is repaired"
    words = [line.partition("step ")[2].split() for line in ended.out.splitlines()]
    seen = [(rank, int(step)) for rank, life, step, _ in words if life == "1"]
    assert set(seen) == {(rank, step) for rank in "01" for step in range(9)}, "none is left out"
    assert not any("nan" in one for one in words)
