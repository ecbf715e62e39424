"""Refuses a torch that TaskD cannot work with before any rank starts.

The version is read from what pip has installed: importing torch takes seconds. A version that is
newer than the tested ones is tried in a separate process (`version_check.py`).
"""

from __future__ import annotations

import subprocess
import sys

from taskd.errors import UnknownTorch
from taskd.runtime.torch_versions import Support, installed_torch, judge, supported_torch

TRIAL = "from taskd.torch.startup.version_check import main; main()"
TIMEOUT_S = 120.0


def check() -> str:
    """Return a warning for the user, or an empty text. Raises UnknownTorch."""
    found = installed_torch()
    if found is None:
        return ""
    match judge(found):
        case Support.TESTED:
            return ""
        case Support.NEWER:
            if problem := find_problem():
                raise UnknownTorch(f"torch {found} does not work with this TaskD: {problem}")
            return (
                f"torch {found} is newer than the tested versions ({supported_torch()}). A short "
                "trial was successful, so the job starts"
            )
        case _:
            raise UnknownTorch(
                f"torch {found} is not supported. Install {supported_torch()}: "
                "pip install --upgrade 'taskd[torch]'"
            )


def find_problem() -> str:
    """Why `taskd.torch` cannot work with the installed torch; empty: nothing was found."""
    command = [sys.executable, "-c", TRIAL]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a short trial took more than {TIMEOUT_S:.0f} s"
    if not done.returncode:
        return ""
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
