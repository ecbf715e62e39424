"""The end of a job: what a death in the code after the loop costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.run.run_job import run, script

TRAIN = """
    import os, signal, sys
    import torch
    import torch.distributed as dist
    import taskd.torch as taskd

    class Seen:
        total = 0

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]

    job, seen = taskd.init(), Seen()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer, seen=seen)
    count, ahead = 0, torch.zeros(4, 8)
    for step in job.steps(12):
        for attempt in step:
            with attempt:
                seen.total += job.rank + 1  # another number on each rank
                loss = model(ahead + job.rank).square().mean()
                loss.backward()
                ahead = torch.randn(4, 8)
                count += 1
                optimizer.step()
                optimizer.zero_grad()
        print("step", int(step), flush=True)
    if sys.argv[1] == "barrier":
        dist.barrier()
    if job.rank == 1 and os.environ["TASKD_INCARNATION"] == "0" and sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "barrier":
        dist.barrier()
    print("weights", sum(p.double().sum().item() for p in model.parameters()))
    print("left", job.rank, count, loss.item(), ahead.sum().item())
    print("seen", job.rank, seen.total)
"""


@pytest.mark.parametrize("after", ["alone", "barrier"])
def test_death_after_the_last_step_costs_only_the_code_after_it(tmp_path: Path, after: str) -> None:
    path, state = script(tmp_path, TRAIN), tmp_path / "state"
    words = ["--nproc-per-node=2", f"--state-dir={state}", path, after]
    ended = run(tmp_path, *words, "killed")
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert sum("step" in line for line in lines) == 2 * 12, "no step is trained again"
    weights = {line.split()[-1] for line in lines if "weights" in line}
    assert len(weights) == 1
    assert {line.partition("seen ")[2] for line in lines if "seen" in line} == {"0 12", "1 24"}
    left = {line.partition("left ")[2] for line in lines if "left" in line}
    assert len(left) == 2, "the code after the loop finds the variables again"
    assert all(line.split()[1] == "12" and "nan" not in line for line in left)
    (incident,) = json.loads((state / "summary.json").read_text())["incidents"]
    assert incident["outcome"] == "restarted"
    kinds = {fault["kind"] for fault in incident["faults"]}
    assert kinds == {"exited"}, "no rank waits for one that cannot park any more"
