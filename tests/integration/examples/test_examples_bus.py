"""The first example is a test: it checks what it shows."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

EXAMPLE = ROOT / "examples/00_bus.py"


def test_the_bus_example_tells_its_story_to_the_end() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "killed with SIGKILL" in ran.stdout
    assert "Nobody else was restarted." in ran.stdout
