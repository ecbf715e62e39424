"""Every script of the gallery ends with the same weights, whatever happens to its ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted({path.name for path in (EXAMPLES / "gallery").glob("*.py")} - {"shared.py"})
SLOW = {"gpt.py"}
"""It compiles for minutes on a small machine; `tests/integration/torch` has a smaller one."""


@pytest.mark.shows(
    "tensor parallelism (DTensor) inside FSDP2, on a two-dimensional mesh",
    "lost rank",
    "yes, from snapshots",
)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in SLOW])
def test_script_ends_with_identical_weights(name: str) -> None:
    seed = os.environ.get("TASKD_CHAOS_SEED", "1")
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "try_gallery.py"), name, seed],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "weights identical to the undisturbed run: yes" in ran.stdout
