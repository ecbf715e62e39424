"""`torch.distributed.checkpoint` in a protected job under `taskd run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.run.run_job import Ended, run, script
from tests.integration.run.test_fallback import JobRecords

TRAIN = """
    import hashlib, os, pathlib, signal

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    torch.manual_seed(0)
    torch.set_num_threads(1)
    job = taskd.init()

    import torch.distributed.checkpoint as dcp  # only now, as in a function of a library

    incarnation = int(os.environ["TASKD_INCARNATION"])
    state = dict(model=torch.nn.Linear(16, 16), step=torch.zeros((), dtype=torch.int64))
    if pathlib.Path("saved/.metadata").exists():
        dcp.load(state, checkpoint_id="saved")
        print(f"loaded {int(state['step'])} replacement {job.is_replacement}", flush=True)
    model = DistributedDataParallel(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(12, start=int(state["step"])):
        with step:
            optimizer.zero_grad()
            if os.environ.get("DIE") == f"{job.rank}.{incarnation}" and step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            (model(torch.randn(8, 16)) - job.rank).square().mean().backward()
            optimizer.step()
        if job.step > step and job.step in (4, 10):
            state["step"].fill_(job.step)
            dcp.save(state, checkpoint_id="saved")
    weights = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), flush=True)
"""


def train(folder: Path, **env: str) -> Ended:
    folder.mkdir()
    path = script(folder, TRAIN)
    return run(folder, "--nproc-per-node=2", "--state-dir=state", path, **env)


def weights(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err
    return sorted(line for line in ended.out.splitlines() if "weights" in line)


@pytest.mark.parametrize("lost", [0, 1])
def test_replacement_that_finds_a_checkpoint_joins_the_running_job(
    tmp_path: Path, lost: int
) -> None:
    undisturbed = train(tmp_path / "undisturbed")
    disturbed = train(tmp_path / "disturbed", DIE=f"{lost}.0")
    assert [line for line in disturbed.out.splitlines() if "loaded" in line] == [
        f"[rank {lost}]: loaded 4 replacement True"
    ]
    assert weights(undisturbed) == weights(disturbed)
    incidents = JobRecords(tmp_path / "disturbed").incidents()
    assert {strategy for strategy, _ in incidents} == {"recover-in-place"}
    assert incidents[-1][1] == "recovered"
