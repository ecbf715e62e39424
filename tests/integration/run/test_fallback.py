"""A strategy fails with `taskd run`, and the next one is tried."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.run.run_job import Job, script

STEPS = 30
TRAIN = """
    import hashlib, os, pathlib, signal

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    incarnation, faulty = int(os.environ["TASKD_INCARNATION"]), pathlib.Path("faulty").exists()

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    class Part:
        "An object of the user that is hard to restore."

        def state_dict(self):
            return dict(of=os.environ["RANK"])

        def load_state_dict(self, state):
            {loading}

    {joining}
    job = taskd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer, part=Part())
    for step in job.steps({steps}):
        with step:
            optimizer.zero_grad()
            if faulty and job.rank == 1 and step == 5:
                {failing}
            (model(torch.randn(8, 16)) - job.rank).square().mean().backward()
            optimizer.step()
    state = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    print("weights", hashlib.sha256(state.numpy().tobytes()).hexdigest(), flush=True)
"""


def train(folder: Path, *, joining: str = "", loading: str = "pass", failing: str) -> str:
    """A script for three ranks. While the file `faulty` exists, rank 1 fails in step 5."""
    (folder / "faulty").touch()
    text = TRAIN.format(steps=STEPS, joining=joining, loading=loading, failing=failing)
    return script(folder, text)


class JobRecords:
    """What a job has written about its faults."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state"

    def incidents(self) -> list[tuple[str, str]]:
        summary: Any = json.loads((self._state / "summary.json").read_text())
        return [(one["strategy"], one["outcome"]) for one in summary["incidents"]]

    def replay(self) -> str:
        journal = self._state / "clusterd.journal"
        command = [sys.executable, "-m", "taskd", "replay", "job", f"--journal={journal}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def start(folder: Path, strategies: str, path: str) -> Job:
    words = ["--nproc-per-node=3", "--job-id=job", "--state-dir=state", "--dump-dir=dump"]
    return Job(folder, *words, f"--strategies={strategies}", path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = start(folder, "exit", train(folder, failing="pass")).end()
    assert ended.code == 0, ended
    return weights(ended.out)


def weights(out: str) -> list[str]:
    found = sorted(re.findall(r"\[rank \d\]: weights \w+", out))
    assert len(found) == 3, out
    return found


@pytest.mark.parametrize(
    "obstacle",
    [
        {"joining": "if incarnation: die()"},
        {"loading": "if incarnation: die()"},
    ],
    ids=["it does not join", "it dies while it gets its state"],
)
def test_survivors_save_checkpoint_if_every_replacement_dies(
    obstacle: dict[str, str], undisturbed: list[str], tmp_path: Path
) -> None:
    """Recovery in place is interrupted each time; then only an emergency checkpoint is left."""
    path = train(tmp_path, failing="die()", **obstacle)
    ended = start(tmp_path, "recover-in-place,dump", path).end()
    records = JobRecords(tmp_path)
    assert ended.code == 1, ended
    assert "step 5 is written" in ended.err, ended
    assert records.incidents() == [("recover-in-place", "superseded")] * 3 + [("dump", "ended")]
    assert "dump is chosen (recover-in-place: new faults interrupted it 3 times" in records.replay()
    (note,) = (tmp_path / "dump").glob("step-*/taskd.json")
    assert json.loads(note.read_text())["step"] == 5
    (tmp_path / "faulty").unlink()
    resumed = start(tmp_path, "recover-in-place,dump", path).end()
    assert resumed.code == 0, resumed
    assert weights(resumed.out) == undisturbed


def test_rank_that_retry_cannot_repair_is_replaced(undisturbed: list[str], tmp_path: Path) -> None:
    """It reports corrupt memory again and again."""
    failing = "if incarnation == 0: raise taskd.Corrupt('the memory controller says so')"
    path = train(tmp_path, failing=failing)
    ended = start(tmp_path, "retry,recover-in-place", path).end()
    records = JobRecords(tmp_path)
    assert ended.code == 0, (ended, records.replay())
    *retried, last = records.incidents()
    assert set(retried) == {("retry", "superseded")}
    assert last == ("recover-in-place", "recovered")
    because = "recover-in-place is chosen (retry: new faults interrupted it 3 times"
    assert because in records.replay()
    assert weights(ended.out) == undisturbed
