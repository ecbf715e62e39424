"""Up to twenty kills on a machine with cores to spare: what is left of the time is ours.

Each kill is a job of its own, and takes turns with the floor of the recovery benchmark. On a
machine with a GPU the same is measured with the device visible: the job trains on the CPU, and the
start of the driver must not be part of its recovery.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import torch

from tests.bench.peers import floor, ours
from tests.bench.peers.ours import Incident
from tests.bench.recovery import account
from tests.bench.rows import Row, ms

KILLS, FEWEST_CORES = 20, 8
LIMIT_S = 330.0
"""No further kill is begun after this time."""
REPEATED = 5
"""How many of the kills are repeated with the device visible, and how many times the second floor
is measured."""
KILL = "SIGKILL of one of 4 ranks until the next step of all ranks"
NOTES = f"""
The job and the floor are those of the recovery benchmark. {KILLS} jobs with one kill each, in turn;
fewer if that takes more than {LIMIT_S / 60:.1f} minutes. The floor's spare process has built its
model and optimizer before the kill. Ours cannot: it runs the script after it, up to the first step,
which is most of `groups`. So the second floor's spare is warmed up with another model, and builds
the job's model and optimizer after the kill; it runs no script, and constructs nothing of TaskD.
"""


def measure() -> list[Row]:
    if (os.cpu_count() or 1) < FEWEST_CORES:
        return []
    has_device = torch.cuda.is_available()
    hidden: list[Incident] = []
    visible: list[Incident] = []
    lowest: list[float] = []
    late: list[float] = []
    began = time.monotonic()
    for number in range(KILLS):
        if time.monotonic() - began > LIMIT_S:
            break
        with _no_devices():
            hidden.append(ours.killed())
            lowest.append(floor.trial().seconds)
            if number < REPEATED:
                late.append(floor.trial(builds_late=True).seconds)
        if has_device and number < REPEATED:
            visible.append(ours.killed())
        print(f"kill {number}: {hidden[-1].seconds:.3f} s, floor {lowest[-1]:.3f} s", flush=True)
    return [
        _against(f"{KILL}, against a no-restart floor", hidden, lowest),
        _against(
            "the same against a floor that builds its model after the kill", hidden, late, None
        ),
        account(hidden),
        Row(
            "incidents per kill",
            f"{sum(one.incidents for one in hidden) / len(hidden):.2f}",
            "",
            max(one.incidents for one in hidden),
            1.0,
        ),
        *(_with_device(visible, hidden) if visible else ()),
    ]


def _with_device(visible: list[Incident], hidden: list[Incident]) -> list[Row]:
    what = "the same on the CPU of a machine with a GPU, with the device visible or hidden"
    return [_against(what, visible, [one.seconds for one in hidden]), account(visible)]


def _against(
    what: str, found: list[Incident], others: list[float], target: float | None = 1.3
) -> Row:
    seconds = [one.seconds for one in found]
    return Row(what, ms(seconds), ms(others), median(seconds) / median(others), target)


@contextmanager
def _no_devices() -> Iterator[None]:
    """Start processes that see no device."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
