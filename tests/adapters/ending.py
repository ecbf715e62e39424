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


def fault(place: str, rank: int, step: int) -> None:
    """FAULTS="rank.step.place …" kills the rank there, once; with a leading "~" it is stopped."""
    for one in os.environ.get("FAULTS", "").split():
        if one.removeprefix("~") != f"{rank}.{step}.{place}":
            continue
        try:
            os.close(os.open(f"done-{one}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        os.kill(os.getpid(), signal.SIGSTOP if one[0] == "~" else signal.SIGKILL)
