"""Frameworks above PyTorch under `taskd run` do what docs/guides/integrations.md says."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import ROOT

PYTHON = ROOT / ".venvs/adapters/bin/python"


def run(folder: Path, script: str, **env: str) -> tuple[list[str], str]:
    """Return the digests that the two ranks have printed, and the log of the launcher."""
    folder.mkdir()
    done = subprocess.run(
        [PYTHON, "-m", "taskd", "run", "--nproc-per-node=2", ROOT / "tests/adapters" / script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **env},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    digests = [line.split("weights ")[1] for line in done.stdout.splitlines() if "weights " in line]
    assert len(digests) == 2
    return digests, done.stderr


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "script", ["with_accelerate.py", "with_prepared_loader.py", "with_fabric.py"]
)
def test_own_loop_loses_no_step(script: str, tmp_path: Path) -> None:
    calm, _ = run(tmp_path / "calm", script)
    disturbed, log = run(tmp_path / "disturbed", script, DIE="1.9")
    assert disturbed == calm
    assert "incident 1: rank 1 (signal 9" in log
    assert "-> recover-in-place: recovered" in log
    assert "state" in log, "no state came from a peer"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("script", ["plain_trainer.py", "plain_lightning.py"])
def test_loop_of_the_framework_restarts_from_its_checkpoint(script: str, tmp_path: Path) -> None:
    calm, _ = run(tmp_path / "calm", script)
    disturbed, log = run(tmp_path / "disturbed", script, DIE="1.13")
    assert disturbed == calm
    assert "1 fault: all ranks have finished" in log
