"""The cost of recording for a DDP job, while it is on and while it is off.

Two ranks, 11.5 million parameters; recording is switched on and off in turn within one process.
While it is off, one hook after the optimizer remains. It is measured alone: within a step it would
be lost in the noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.rows import Row, ms

SCRIPT = Path(__file__).with_name("profiling_train.py")
STEPS, STRETCHES, RUNS = 10, 8, 1
DEADLINE_S = 400.0
COLLECTIVES = 3
"""Gradient buckets of this model in one step."""


def measure() -> list[Row]:
    off: list[float] = []
    on: list[float] = []
    costs: list[float] = []
    hook_times: list[float] = []
    hooks: list[float] = []
    for _ in range(RUNS):
        result = _run()
        off += result["off"]
        on += result["on"]
        # Each stretch is compared with its neighbour, not with one that ran minutes later.
        costs += [b / a for a, b in zip(result["off"], result["on"], strict=True)]
        hook_times.append(result["hook_s"])
        hooks.append(result["hooks_s"])
    hook_s, step_s, hooks_s = median(hook_times), median(off), median(hooks)
    return [
        Row(
            "a DDP step, everything recorded (median of neighbouring intervals)",
            ms(on),
            f"{ms(off)}, nothing recorded",
            median(costs),
            1.01,
        ),
        Row(
            f"the same, from the time spent in the hooks, {COLLECTIVES} collectives per step",
            f"{hooks_s * 1e6:.0f} µs per collective",
            f"{step_s * 1e3:.1f} ms",
            1 + COLLECTIVES * hooks_s / step_s,
            1.01,
        ),
        Row(
            "a DDP step, nothing recorded: the hook's share of it",
            f"{hook_s * 1e6:.2f} µs",
            f"{step_s * 1e3:.1f} ms",
            1 + hook_s / step_s,
            1.001,
        ),
    ]


def _run() -> dict[str, Any]:
    script = (str(SCRIPT), str(STEPS), str(STRETCHES))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "taskd", "run", "--nproc-per-node=2", *script],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, "TASKD_PROFILING_DIR": folder, "OMP_NUM_THREADS": "1"},
        )
    if done.returncode or "RESULT" not in done.stdout:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    result: dict[str, Any] = json.loads(done.stdout.split("RESULT ")[1].splitlines()[0])
    return result
