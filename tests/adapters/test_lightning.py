"""The strategy of taskd.integrations.lightning: the same in every bit, whatever fails where."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ROOT
from tests.adapters.test_transformers import assert_same

PYTHON = ROOT / ".venvs/adapters/bin/python"
ADAPTER = "taskd.integrations.lightning"


def run(
    folder: Path, faults: str = "", env: dict[str, str] | None = None, ranks: int = 2
) -> dict[str, Any]:
    """What the job has left in its folder: results of all ranks, logs and checkpoints."""
    folder.mkdir(exist_ok=True)
    command = [PYTHON, "-m", "taskd", "run", f"--nproc-per-node={ranks}"]
    preload, script = f"--preload={ADAPTER}", "resilient_lightning.py"
    done = subprocess.run(
        [*map(str, command), preload, ROOT / "tests/adapters" / script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FAULTS": faults, **(env or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.timeout(300)
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
    assert_same(calm, disturbed, len(faults.split()))


@pytest.mark.timeout(500)
def test_early_stopping_with_workers_is_exact(tmp_path: Path) -> None:
    env = {"STOP_EARLY": "0.5", "WORKERS": "1"}
    calm = run(tmp_path / "calm", env=env)
    disturbed = run(tmp_path / "run", "0.4.forward", env)
    assert_same(calm, disturbed, 1)


@pytest.mark.timeout(300)
def test_lightning_that_lacks_a_name_is_refused_with_its_purpose() -> None:
    owner, name = "lightning.pytorch.loops.training_epoch_loop", "_broadcast_sigterm_tensor"
    code = f"from {owner} import _TrainingEpochLoop as loop; del loop.{name}; import {ADAPTER}"
    done = subprocess.run(
        [PYTHON, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode != 0
    lacking = f"lacks {owner}._TrainingEpochLoop.{name}, which TaskD needs for repeating a batch"
    assert lacking in done.stderr, done.stderr
