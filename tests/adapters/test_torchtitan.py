"""The Trainer of taskd.integrations.torchtitan: the same in every bit, whatever fails where."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests import ROOT
from tests.adapters.test_transformers import LIMIT_S, PYTHON, assert_same, event_lines

PRELOAD = "--preload=tests.adapters.titan_on_cpu,taskd.integrations.torchtitan"


def run(folder: Path, faults: str = "", options: str = "{}") -> dict[str, Any]:
    """What two ranks have left in the folder: their state, their logs, and the checkpoints."""
    folder.mkdir()
    script = ROOT / "tests/adapters/resilient_titan.py"
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FAULTS": faults, "TITAN_OPTIONS": options}
    done = subprocess.run(
        [PYTHON, "-m", "taskd", "run", "--nproc-per-node=2", PRELOAD, script],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left: dict[str, Any] = {
        path.name: json.loads(path.read_text()) for path in folder.glob("end-*.json")
    }
    for path in sorted(folder.glob("outputs/checkpoint/*/*.distcp")):
        left[str(path.relative_to(folder))] = path.read_bytes()
    left["logs"] = [event_lines(folder / f"log-{rank}") for rank in range(2)]
    left["launcher"] = done.stderr
    return left


@cache
def calm(options: str) -> dict[str, Any]:
    return run(Path(mkdtemp()) / "run", options=options)


SHARDED = json.dumps({})


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (SHARDED, "1.2.forward 0.3.optimizer 1.5.backward 0.6.updated ~1.8.forward 0.12.after"),
        (SHARDED, "0.3.log 1.4.saving 0.5.validating 0.8.saved 1.10.validating 0.14.saving"),
    ],
    ids=["in steps", "between steps"],
)
def test_trainer_loses_no_step(options: str, faults: str, tmp_path: Path) -> None:
    expected = calm(options)
    disturbed = run(tmp_path / "run", faults, options)
    assert_same(dict(expected), disturbed, len(faults.split()))
