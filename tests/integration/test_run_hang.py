"""A rank that stops moving under `taskd run`: named with its evidence, replaced, nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.run_job import run, script

PROTECTED = """
    import os, signal, sys, threading
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    seen = 0
    for step in job.steps(60):
        with step:
            model(torch.randn(4, 8) + job.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.02)
            seen += 1
            if job.rank == 1 and os.environ["TASKD_INCARNATION"] == "0" and seen == 25:
                exec(sys.argv[1])
    print("weights", sum(p.double().sum().item() for p in model.parameters()))
"""

HANGS = {
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "deadlocked": "threading.Event().wait()",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("how", HANGS)
def test_one_rank_is_replaced_and_the_weights_are_the_same(tmp_path: Path, how: str) -> None:
    path = script(tmp_path, PROTECTED)
    undisturbed = run(tmp_path, "--nproc-per-node=2", path, "pass")
    assert undisturbed.code == 0, undisturbed.err
    state = tmp_path / "state"
    ended = run(tmp_path, "--nproc-per-node=2", f"--state-dir={state}", path, HANGS[how])
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == sorted(undisturbed.out.splitlines())
    incident = json.loads((state / "summary.json").read_text())["incidents"][-1]
    assert [fault["rank"] for fault in incident["faults"]] == [1]
    if how != "killed":
        assert incident["faults"][0]["kind"] == "hung"
        assert "rank 1 has not moved" in incident["faults"][0]["evidence"]
    if how == "deadlocked":
        assert "in <module>" in incident["faults"][0]["evidence"], "its stack is missing"
