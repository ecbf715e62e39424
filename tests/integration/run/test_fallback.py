"""A strategy fails under `taskd run`, and the next one follows."""

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

    life, sick = int(os.environ["TASKD_INCARNATION"]), pathlib.Path("sick").exists()

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    class Part:
        "Something of the user's own that is hard to set up."

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
            if sick and job.rank == 1 and step == 5:
                {failing}
            (model(torch.randn(8, 16)) - job.rank).square().mean().backward()
            optimizer.step()
    state = torch.cat([tensor.flatten() for tensor in model.state_dict().values()])
    print("weights", hashlib.sha256(state.numpy().tobytes()).hexdigest(), flush=True)
"""


def train(folder: Path, *, joining: str = "", loading: str = "pass", failing: str) -> str:
    """A script for three ranks. As long as it is sick, rank 1 does not get past its fifth step."""
    (folder / "sick").touch()
    text = TRAIN.format(steps=STEPS, joining=joining, loading=loading, failing=failing)
    return script(folder, text)


class Told:
    """What a job has left about its faults."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "state"

    def incidents(self) -> list[tuple[str, str]]:
        told: Any = json.loads((self._state / "summary.json").read_text())
        return [(one["strategy"], one["outcome"]) for one in told["incidents"]]

    def replay(self) -> str:
        journal = self._state / "clusterd.journal"
        command = [sys.executable, "-m", "taskd", "replay", "job", f"--journal={journal}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def start(folder: Path, strategies: str, path: str) -> Job:
    words = ["--nproc-per-node=3", "--job-id=job", "--state-dir=state", "--dump-dir=dump"]
    return Job(folder, *words, f"--strategies={strategies}", path)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("calm")
    ended = start(folder, "exit", train(folder, failing="pass")).end()
    assert ended.code == 0, ended
    return weights(ended.out)


def weights(out: str) -> list[str]:
    found = sorted(re.findall(r"\[rank \d\]: weights \w+", out))
    assert len(found) == 3, out
    return found


@pytest.mark.parametrize(
    "trap",
    [
        {"joining": "if life: raise SystemExit('no licence for another process')"},
        {"loading": "if life: die()"},
    ],
    ids=["it does not join", "it dies when it is given its state"],
)
def test_no_replacement_lives_so_the_survivors_write(
    trap: dict[str, str], calm: list[str], tmp_path: Path
) -> None:
    """Recovery in place is cut short each time; then all that is left to do is to save."""
    path = train(tmp_path, failing="die()", **trap)
    ended = start(tmp_path, "recover-in-place,dump", path).end()
    told = Told(tmp_path)
    assert ended.code == 1, ended
    assert "step 5 is written" in ended.err, ended
    assert told.incidents() == [("recover-in-place", "superseded")] * 3 + [("dump", "ended")]
    assert "dump, as recover-in-place: cut short by new faults 3 times" in told.replay()
    (note,) = (tmp_path / "dump").glob("step-*/taskd.json")
    assert json.loads(note.read_text())["step"] == 5
    (tmp_path / "sick").unlink()
    resumed = start(tmp_path, "recover-in-place,dump", path).end()
    assert resumed.code == 0, resumed
    assert weights(resumed.out) == calm


@pytest.mark.parametrize(
    ("loading", "because"),
    [
        (
            "if life == 0 and state['of'] != os.environ['RANK']: raise RuntimeError('not mine')",
            "retry failed with 405",
        ),
        ("pass", "recover-in-place, as retry: cut short by new faults 3 times"),
    ],
    ids=["it takes nothing", "it fails again"],
)
def test_a_rank_that_no_retry_mends_is_replaced(
    loading: str, because: str, calm: list[str], tmp_path: Path
) -> None:
    """It says that its memory is bad, again and again; or it cannot take what a peer gives it."""
    failing = "if life == 0: raise taskd.Corrupt('the memory controller says so')"
    path = train(tmp_path, loading=loading, failing=failing)
    ended = start(tmp_path, "retry,recover-in-place", path).end()
    told = Told(tmp_path)
    assert ended.code == 0, (ended, told.replay())
    *retried, last = told.incidents()
    assert set(retried) == {("retry", "superseded")}
    assert last == ("recover-in-place", "recovered")
    assert because in told.replay()
    assert weights(ended.out) == calm
