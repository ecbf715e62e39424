"""The strategy of taskd.integrations.lightning: the same in every bit, whatever fails where."""

from __future__ import annotations

import csv
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.adapters.test_transformers import LIMIT_S, assert_equal, assert_same

PYTHON = ROOT / ".venvs/adapters/bin/python"
ADAPTER = "taskd.integrations.lightning"


def run(
    folder: Path,
    faults: str = "",
    env: dict[str, str] | None = None,
    ranks: int = 2,
    code: int = 0,
) -> dict[str, Any]:
    """What the job has left in its folder: results of all ranks, logs and checkpoints."""
    folder.mkdir(exist_ok=True)
    command = [PYTHON, "-m", "taskd", "run", f"--nproc-per-node={ranks}"]
    command += (env or {}).get("OPTIONS", "").split()
    preload, script = f"--preload={ADAPTER}", "resilient_lightning.py"
    done = subprocess.run(
        [*map(str, command), preload, ROOT / "tests/adapters" / script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FAULTS": faults, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    left: dict[str, Any] = {
        path.name: json.loads(path.read_text().replace(str(folder), "."))
        for path in folder.glob("end-*.json")
    }
    left["weights"] = sorted(
        line.split("weights ")[1] for line in done.stdout.splitlines() if "weights " in line
    )
    for path in sorted(
        [*folder.glob("saved/*"), *folder.glob("best/*"), *folder.glob("logs/*/*/*")]
    ):
        left[str(path.relative_to(folder))] = content(path, folder)
    left["events"] = [
        # A replacement repeats the code after the step of its predecessor.
        list(dict.fromkeys((folder / f"events-{rank}").read_text().splitlines()))
        for rank in range(ranks)
    ]
    left["launcher"] = done.stderr
    return left


def content(path: Path, folder: Path) -> Any:
    """A checkpoint contains the names of files in the folder of its job, so bytes would differ."""
    if path.suffix == ".ckpt":
        return comparable(torch.load(path, weights_only=True), str(folder))
    return path.read_text()


def comparable(value: Any, folder: str) -> Any:
    """Every value, every bit of a tensor; names of files without the folder of the job."""
    match value:
        case torch.Tensor():
            return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
        case dict():
            return {comparable(k, folder): comparable(v, folder) for k, v in value.items()}
        case list() | tuple():
            return [comparable(one, folder) for one in value]
        case str():
            return value.replace(folder, ".")
        case _:
            return repr(value)


@pytest.fixture(scope="module")
def calm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calm") / "run"


@pytest.fixture(scope="module")
def calm(calm_folder: Path) -> dict[str, Any]:
    return run(calm_folder)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "faults",
    [
        "1.2.forward 0.6.optimizer 1.11.scheduler 0.14.zero_grad ~1.19.backward",
        "0.3.batch 1.5.prediction 0.7.saving 1.9.epoch 0.13.log 0.15.saved 1.18.validated",
    ],
    ids=["in steps", "between steps"],
)
def test_trainer_loses_no_step(faults: str, calm: dict[str, Any], tmp_path: Path) -> None:
    disturbed = run(tmp_path / "run", faults)
    assert "changes after the optimizer's update" not in disturbed["launcher"]
    assert_same(calm, disturbed, len(faults.split()))


LEFT = """
import lightning
import torch
from taskd.integrations.lightning import ResilientStrategy

class Net(lightning.LightningModule):
    def forward(self, one):
        return one + 1

    def training_step(self, batch):
        return self(batch) * 2

def leave(*_):
    raise KeyboardInterrupt

redirection, net = ResilientStrategy()._forward_redirection, Net()
wrapper = torch.nn.Sequential(net)
hook = wrapper.register_forward_pre_hook(leave)
try:
    redirection(wrapper, net, "training_step", torch.ones(1))
except KeyboardInterrupt:
    hook.remove()
assert redirection(wrapper, net, "training_step", torch.ones(1)).item() == 4
"""


@pytest.mark.timeout(2 * LIMIT_S)
def test_attempt_that_was_left_before_the_training_step_can_be_repeated() -> None:
    """As in a rank that learns of the loss of another one when DDP's forward pass begins."""
    done = subprocess.run(
        [PYTHON, "-c", LEFT],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(2 * LIMIT_S)
def test_early_stopping_with_workers_is_exact(tmp_path: Path) -> None:
    env = {"STOP_EARLY": "0.5", "WORKERS": "1"}
    calm = run(tmp_path / "calm", env=env)
    disturbed = run(tmp_path / "run", "0.4.forward", env)
    assert_same(calm, disturbed, 1)


OPTIONS = {
    "accumulation": (
        {"ACCUMULATE": "3", "VALIDATE_FIRST": "1"},
        "1.1.forward 0.5.optimizer 1.6.batch 0.9.log 1.9.saving",
    ),
    "manual optimization": (
        {"MANUAL": "1"},
        "1.2.forward 0.5.optimizer 1.8.batch 0.11.saving 1.14.backward 0.19.epoch",
    ),
    "two optimizers": ({"MANUAL": "2"}, "1.2.forward 0.4.toggled ~1.9.toggled 0.12.batch"),
    "bf16": (
        {"PRECISION": "bf16-mixed"},
        "0.2.forward 1.6.optimizer 0.11.batch 0.19.epoch",
    ),
}


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_is_exact(option: str, tmp_path: Path) -> None:
    env, faults = OPTIONS[option]
    calm = run(tmp_path / "calm", env=env)
    disturbed = run(tmp_path / "run", faults, env)
    assert_same(calm, disturbed, len(faults.split()))


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("checkpoint", "faults"),
    [
        ("epoch=1-step=12.ckpt", "1.13.forward 0.14.batch 1.18.prediction 0.19.saving"),
        ("epoch=1-step=20.ckpt", "0.21.forward 1.22.prediction 0.26.backward"),
    ],
    ids=["in the middle of an epoch", "at its end"],
)
def test_resumed_training_is_exact(
    checkpoint: str, faults: str, calm: dict[str, Any], calm_folder: Path, tmp_path: Path
) -> None:
    env = {"RESUME": str(calm_folder / "saved" / checkpoint)}
    undisturbed = run(tmp_path / "calm", env=env)
    disturbed = run(tmp_path / "run", faults, env)
    assert "joins a running job, and the result of" not in disturbed["launcher"]
    assert_same(undisturbed, disturbed, len(faults.split()))
    assert undisturbed["weights"] == calm["weights"]
    for rank in range(2):
        end, expected = undisturbed[f"end-{rank}.json"], calm[f"end-{rank}.json"]
        assert end["optimizer"] == expected["optimizer"]
        assert end["scheduler"] == expected["scheduler"]


@pytest.mark.timeout(4 * LIMIT_S)
def test_early_stopping_at_the_moment_of_a_fault(tmp_path: Path) -> None:
    """The decision is made after batch 5, in the third validation."""
    env = {"STOP_EARLY": "0.5"}
    calm = run(tmp_path / "calm", env=env)
    assert '"batch": 5' in calm["events"][0][-1]
    for number, faults in enumerate(["0.5.prediction 1.5.decided", "1.5.validated 0.5.epoch"]):
        disturbed = run(tmp_path / f"run-{number}", faults, env)
        assert_same(calm, disturbed, len(faults.split()))
    # Its peer has left the loop: both start again, with the state of the end.
    disturbed = run(tmp_path / "end", "0.5.ended", env)
    assert "all 6 steps are done" in disturbed["launcher"], disturbed["launcher"]
    lines = (tmp_path / "end/events-0").read_text().splitlines()
    batches = [line for line in lines if '"event": "batch"' in line]
    assert len(batches) == 6, "a batch was trained again"
    # Its peer may have come to the end of the script: that end runs twice.
    assert set(disturbed["weights"]) == set(calm["weights"])
    disturbed["weights"] = calm["weights"]
    assert_equal(calm, {name: left for name, left in disturbed.items() if "version_1" not in name})


@pytest.mark.timeout(2 * LIMIT_S)
def test_everything_is_killed(calm: dict[str, Any], tmp_path: Path) -> None:
    """The next start resumes from a continuous checkpoint."""
    env, folder = {"OPTIONS": "--checkpoint-every=9"}, tmp_path / "run"
    waits = {"AWAIT": "10", "TASKD_QUIET_FLOOR_S": "90"}
    run(folder, "!1.11.forward", {**env, **waits}, code=-9)
    resumed = run(folder, env=env)
    assert "resuming at step 9" in resumed["launcher"], resumed["launcher"]
    expected, before, after = (
        list(
            csv.DictReader(left[f"logs/lightning_logs/version_{version}/metrics.csv"].splitlines())
        )
        for left, version in ((calm, 0), (resumed, 0), (resumed, 1))
    )
    assert before == expected[: len(before)]
    assert after == expected[len(expected) - len(after) :]
    assert len(before) + len(after) >= len(expected)
    assert_equal(without_logs(calm), without_logs(resumed))


def without_logs(left: dict[str, Any]) -> dict[str, Any]:
    """Every start has a log of its own."""
    return {name: value for name, value in left.items() if not name.startswith("logs/")}


@pytest.mark.timeout(2 * LIMIT_S)
def test_two_of_three_ranks_are_lost_at_once(tmp_path: Path) -> None:
    calm = run(tmp_path / "calm", ranks=3)
    faults = "0.4.forward 1.4.forward 1.9.optimizer 2.9.optimizer 0.14.batch 2.14.batch"
    disturbed = run(tmp_path / "run", faults, ranks=3)
    assert "restart" not in disturbed["launcher"], disturbed["launcher"]
    assert_equal(calm, disturbed)


@pytest.mark.timeout(2 * LIMIT_S)
def test_callback_that_raises_ends_the_job_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the callback has failed"):
        run(tmp_path / "run", env={"RAISE_AT": "3"})


@pytest.mark.timeout(2 * LIMIT_S)
def test_lightning_that_lacks_a_name_is_refused_with_its_purpose() -> None:
    owner, name = "lightning.pytorch.loops.training_epoch_loop", "_broadcast_sigterm_tensor"
    code = f"from {owner} import _TrainingEpochLoop as loop; del loop.{name}; import {ADAPTER}"
    done = subprocess.run(
        [PYTHON, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode != 0
    lacking = f"lacks {owner}._TrainingEpochLoop.{name}, which TaskD needs for repeating a batch"
    assert lacking in done.stderr, done.stderr
