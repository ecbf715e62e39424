"""Ranks that wait for each other, or for a rank that does nothing: the wait ends in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.integration.run.run_job import run, script

SETUP = """
    import os, signal, sys, threading
    import torch
    import torch.distributed as dist
    import taskd.torch as taskd

    first = os.environ["TASKD_INCARNATION"] == "0"
    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
"""
TRAIN = """
            model(torch.randn(4, 8) + job.rank).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""

DISAGREE = f"""{SETUP}
    os.environ["FRESH"] = "1"  # a variable of the script would be given to its replacement
    for step in job.steps(30):
        fresh = os.environ.pop("FRESH", None)
        if fresh and step > 0 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            # As a library does that prepares its loader again: no other rank sends this.
            dist.recv(torch.empty(1), src=1 - job.rank)
        with step:
            if job.rank == 1 and step == 20 and first:
                os.kill(os.getpid(), signal.SIGKILL)
{TRAIN}
"""


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_ranks_that_disagree_after_a_repair_restart_in_seconds(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["--nproc-per-node=2", f"--state-dir={state}", script(tmp_path, DISAGREE)]
    ended = run(tmp_path, *words)
    assert ended.code == 0, ended.err
    assert "all 2 ranks wait for each other" in ended.err
    assert ended.err.count("in backward") >= 1, "the stacks of all ranks are shown"
    assert "in recv" in ended.err
    first, last = summary(state)["incidents"]
    assert "no rank continued after the repair" in first["because"]
    assert last["outcome"] == "restarted"


BETWEEN = f"""{SETUP}
    for step in job.steps(30):
        with step:
{TRAIN}
        if job.rank == 1 and step == 20 and first:
            threading.Event().wait()
"""


def test_rank_that_does_nothing_between_two_steps_is_replaced(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["--nproc-per-node=2", f"--state-dir={state}", script(tmp_path, BETWEEN)]
    ended = run(tmp_path, *words, TASKD_QUIET_FLOOR_S="4")
    assert ended.code == 0, ended.err
    (incident,) = summary(state)["incidents"]
    (fault,) = incident["faults"]
    assert (fault["rank"], fault["kind"]) == (1, "hung")
    assert "between steps, in no collective" in fault["evidence"]
    assert "threading.py" in fault["evidence"]
