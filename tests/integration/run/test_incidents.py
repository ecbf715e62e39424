"""Each kill of a rank is one incident: what its peers notice of it does not count again."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.run.run_job import run, script

KILLS = 10
TRAIN = """
    import os, signal, sys
    from pathlib import Path
    import torch
    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(10 * int(sys.argv[1]) + 10):
        with step:
            loss = model(torch.randn(4, 8) + job.rank).square().mean()
            kill, at = divmod(int(step), 10)
            mark = Path(f"killed{kill}")
            if kill and at == 0 and job.rank == kill % job.world_size and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def test_ten_kills_are_ten_incidents(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["--nproc-per-node=3", f"--state-dir={state}", script(tmp_path, TRAIN), str(KILLS)]
    ended = run(tmp_path, *words)
    assert ended.code == 0, ended.err
    incidents = json.loads((state / "summary.json").read_text())["incidents"]
    ranks = [{fault["rank"] for fault in one["faults"]} for one in incidents]
    assert len(ranks) == KILLS, ended.err
    # On a slow machine a kill may come before all ranks have reported the end of the last repair.
    assert all(kill % 3 in found for kill, found in enumerate(ranks, 1)), ended.err
