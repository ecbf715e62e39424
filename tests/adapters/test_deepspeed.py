"""DeepSpeed's ZeRO-1 and ZeRO-2 with taskd.integrations.deepspeed: the same in every bit."""

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

FOLDER = ROOT / "tests/adapters"


def run(folder: Path, faults: str = "", options: str = "{}") -> dict[str, Any]:
    """What two ranks have left in the folder: their state, and their logs."""
    folder.mkdir()
    command: list[str | Path] = [PYTHON, "-m", "taskd", "run", "--nproc-per-node=2"]
    env = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "FAULTS": faults, "ZERO_OPTIONS": options}
    done = subprocess.run(
        [*command, "--preload=taskd.integrations.deepspeed", FOLDER / "resilient_zero.py"],
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
    left["saved"] = sorted(str(path.relative_to(folder)) for path in folder.glob("saved/*/*"))
    left["logs"] = [event_lines(folder / f"log-{rank}") for rank in range(2)]
    left["launcher"] = done.stderr
    return left


@cache
def calm(options: str) -> dict[str, Any]:
    return run(Path(mkdtemp()) / "run", options=options)


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ('{"stage": 2}', "1.1.forward 0.3.backward 1.5.clip 0.7.updated ~1.9.forward 1.13.end"),
        ('{"stage": 2}', "0.2.before 1.6.saving 0.8.after 0.12.saving 1.15.after"),
        ('{"stage": 1, "bf16": true}', "0.1.backward 1.4.updated 0.6.end ~0.10.clip 1.18.saving"),
    ],
    ids=["in steps", "between steps", "ZeRO-1 with bf16"],
)
def test_engine_loses_no_step(options: str, faults: str, tmp_path: Path) -> None:
    expected = calm(options)
    disturbed = run(tmp_path / "run", faults, options)
    assert_same(dict(expected), disturbed, len(faults.split()))


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attempt_leaves_no_trace_in_the_engine(dtype: str, tmp_path: Path) -> None:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [PYTHON, FOLDER / "zero_undo.py", "2", dtype],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **alone},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"], "an attempt that was left has changed the weights"
    assert "ZeRO stage 3" in found["stage 3"]
    assert "wall_clock_breakdown" in found["timers"]
