"""One unchanged script under three launchers: plain Python, torchrun and `taskd run`.

Random numbers depend on the step, not on the launcher: the same ranks give the same weights.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.integration.run.run_job import DEADLINE_S
from tests.integration.run.run_job import run as taskd_run

SCRIPT = str(ROOT / "examples/train_ddp.py")
STEPS = 8
PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        pytest.param(PYTHON, 1, id="python"),
        pytest.param((*TORCHRUN, "--nproc-per-node=1"), 1, id="torchrun with one rank"),
        pytest.param((*TORCHRUN, "--nproc-per-node=2"), 2, id="torchrun"),
    ],
)
def test_weights_do_not_depend_on_the_launcher(
    command: tuple[str, ...], ranks: int, tmp_path: Path
) -> None:
    ran = subprocess.run(
        [*command, SCRIPT, str(STEPS)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    ours = taskd_run(tmp_path, f"--nproc-per-node={ranks}", SCRIPT, str(STEPS))
    assert ours.code == 0, ours.err
    assert ended(ran.stdout) == ended(ours.out)
    assert f"{STEPS} steps with {ranks} ranks" in ran.stdout


def ended(output: str) -> str:
    found = re.search(r"\d+ steps with \d+ ranks, loss [\d.]+, weights \w{16}", output)
    assert found, output
    return found.group()
