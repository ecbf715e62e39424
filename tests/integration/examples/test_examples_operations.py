"""The examples of operations run with the documented command and succeed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["09_switch_nic.py", "10_stress_test.py"])
def test_example_ends_with_identical_weights(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=280
    )
    if "only one interface" in ran.stderr:
        pytest.skip("this machine has only one interface")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "weights identical to the undisturbed run: yes" in ran.stdout
