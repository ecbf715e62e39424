"""How the scripts of these tests end: too early, if they are told to, or with a digest."""

from __future__ import annotations

import hashlib
import os
import signal
import sys

from torch import nn


def die(rank: int, step: int) -> None:
    """DIE=rank.step kills the first life of that rank there."""
    first = os.environ["TASKD_INCARNATION"] == "0"
    if first and os.environ.get("DIE") == f"{rank}.{int(step)}":
        os.kill(os.getpid(), signal.SIGKILL)


def show(model: nn.Module) -> None:
    state = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    sys.stdout.write(f"weights {hashlib.sha256(state).hexdigest()}\n")
