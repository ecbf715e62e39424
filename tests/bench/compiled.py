"""Recovery of a job that uses torch.compile, against the cold compilation in the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.bench.rows import Row, ms

RANKS, STEPS, KILL_EVERY = 2, 185, 30
"""The standby needs some seconds between two kills."""
SCRIPT = Path(__file__).with_name("compiled_train.py")
NOTES = f"""
A transformer with two layers, DDP over gloo, {RANKS} ranks, inductor on the CPU, and an empty cache
of compiled code. Rank 1 kills itself in the middle of a step, {(STEPS - 1) // KILL_EVERY} times.
The cold compilation is the first step of the same run. A recovery ends when both ranks have
finished the same step again.
"""


def measure() -> list[Row]:
    cold, recoveries = _run()
    what = "SIGKILL of one of 2 compiled ranks until the next step of both"
    return [
        Row(f"{what}, in seconds", ms(recoveries), "", median(recoveries), 3.0),
        Row(
            "the first step with an empty cache, how much slower",
            ms(recoveries),
            f"{cold:.1f} s",
            cold / median(recoveries),
            5.0,
            at_least=True,
        ),
    ]


def _run() -> tuple[float, list[float]]:
    """How long the cold compilation took, and each recovery."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
        command = [sys.executable, "-m", "taskd", "run", f"--nproc-per-node={RANKS}", str(SCRIPT)]
        command += [folder, str(STEPS), str(KILL_EVERY)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        ranks = [_times(Path(folder, f"steps.{rank}")) for rank in range(RANKS)]
    cold = max(times["end", 0] - times["begin", 0] for times in ranks)
    kills = {step: at for (event, step), at in ranks[1].items() if event == "kill"}
    return cold, [_next_end(ranks, step) - at for step, at in kills.items()]


def _next_end(ranks: list[dict[tuple[str, int], float]], killed: int) -> float:
    """When both ranks had finished a step: the killed one, or the next if one had committed it."""
    step = next(step for step in (killed, killed + 1) if all(("end", step) in t for t in ranks))
    return max(times["end", step] for times in ranks)


def _times(path: Path) -> dict[tuple[str, int], float]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {(event, int(step)): float(at) for event, step, at in lines}
