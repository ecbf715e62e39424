"""The examples of operations are run as a reader would run them, and must end well."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["09_switch_nic.py", "10_stress_test.py"])
def test_an_example_ends_with_the_same_weights(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=280
    )
    if "one interface only" in ran.stderr:
        pytest.skip("this machine has one interface only")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "weights identical to the undisturbed run: yes" in ran.stdout
