"""How the scripts of these tests end: killed at a given step, or with a digest of the weights."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch
from torch import nn


def die(rank: int, step: int) -> None:
    """DIE=rank.step kills the first incarnation of that rank at that step."""
    first = os.environ["TASKD_INCARNATION"] == "0"
    if first and os.environ.get("DIE") == f"{rank}.{int(step)}":
        os.kill(os.getpid(), signal.SIGKILL)


def await_checkpoint(step: int) -> None:
    """AWAIT=step lets all ranks wait there, between two steps, for a continuous checkpoint."""
    if os.environ.get("AWAIT") != str(step):
        return
    pause = threading.Event()
    for _ in range(4000):
        if any(Path(os.environ["TASKD_DUMP_DIR"]).glob("step-*/taskd.json")):
            return
        pause.wait(0.02)
    raise SystemExit("no checkpoint in time")


def show(model: nn.Module) -> None:
    sys.stdout.write(f"weights {digest(model.parameters())}\n")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of what this rank holds of them."""
    own = (getattr(one, "_local_tensor", one).detach() for one in tensors)
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in own)).hexdigest()


def fault(place: str, rank: int, step: int) -> None:
    """FAULTS="rank.step.place …" kills the rank there, once; with a leading "~" it is stopped.

    With a leading "!" the launcher is killed, and everything with it.
    """
    for one in os.environ.get("FAULTS", "").split():
        if one.lstrip("~!") != f"{rank}.{step}.{place}":
            continue
        try:
            os.close(os.open(f"done-{one}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if one[0] == "!":
            zygote = psutil.Process().parent()
            assert zygote is not None
            os.kill(zygote.ppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP if one[0] == "~" else signal.SIGKILL)
