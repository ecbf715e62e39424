"""The bus example checks what it shows, so running it is a test."""

from __future__ import annotations

import subprocess
import sys

from tests import ROOT

EXAMPLE = ROOT / "examples/00_bus.py"


def test_bus_example_reaches_all_positions_after_manager_restart() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=150, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "killed with SIGKILL" in ran.stdout
    assert "No other process was restarted." in ran.stdout
