"""How the scripts of these tests end: killed at a given step, or with a digest of the weights."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

from torch import nn


def die(rank: int, step: int) -> None:
    """DIE=rank.step kills the first incarnation of that rank at that step."""
    first = os.environ["TASKD_INCARNATION"] == "0"
    if first and os.environ.get("DIE") == f"{rank}.{int(step)}":
        os.kill(os.getpid(), signal.SIGKILL)


def show(model: nn.Module) -> None:
    state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    sys.stdout.write(f"weights {hashlib.sha256(state).hexdigest()}\n")
