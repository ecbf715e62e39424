"""Every numbered example runs with the documented command and succeeds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests import ROOT
from tests.integration import namespaces
from tests.integration.etcd import etcd_server

EXAMPLES = ROOT / "examples"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        "01_kill_a_rank.py",
        "02_hung_rank.py",
        "03_cut_links.py",
        "04_fsdp2_buddies.py",
        "06_emergency_checkpoint.py",
        "11_lose_node_zero.py",
        "demo.py",
    ],
)
def test_example_ends_with_identical_weights(name: str) -> None:
    if name == "11_lose_node_zero.py":
        etcd_server.binary()  # installed if it is missing
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "weights identical to the undisturbed run: yes" in ran.stdout
    assert "joins a running job" not in ran.stdout, "a warning that the user cannot act on"
    if name == "03_cut_links.py" and namespaces.possible():
        assert "eth0 cut" in ran.stdout, "namespaces are available, but no cable was cut"


@pytest.mark.timeout(240)
def test_lost_node_loses_no_sample() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "05_lose_a_node.py")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "400 steps with 2 and 4 ranks" in ran.stdout
    assert "each of 1600 samples used once: yes" in ran.stdout
