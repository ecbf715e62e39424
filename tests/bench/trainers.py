"""The adapters for Trainers: recovery against our own loop, and steps against the plain Trainer.

The same model, data, optimizer and number of ranks in all. The kinds take turns, so that a busy
minute of the machine affects all of them. It needs the environment of `make test-adapters`.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from tests import ROOT
from tests.bench.rows import Row, ms

PYTHON = ROOT / ".venvs/adapters/bin/python"
FRAMEWORKS = ("transformers", "lightning")
ROUNDS = 1 if os.environ.get("TASKD_BENCH_QUICK") else 5
STEPS_KILLED, KILL_AT = 16, 8
STEPS_CALM, WARM_UP = 120, 20
LIMIT_S = 240.0
NOTES = f"""
How this was measured: a GPT-2 of a million parameters, batches of 8 texts of 64 words, AdamW with a
schedule, clipping, 2 ranks over gloo, one thread each. *Killed*: rank 1 kills itself in the forward
pass of step {KILL_AT}; the time ends when both ranks have finished that step. *Overhead*: the
median time of {STEPS_CALM - WARM_UP} steps of rank 0, of the adapter and of the plain Trainer under
the same `taskd run`; the ratio is the median over {ROUNDS} pairs of runs.
"""


def measure() -> list[Row]:
    if not PYTHON.exists():
        return []
    killed: dict[str, list[float]] = {}
    steps: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        kinds = ["loop", *FRAMEWORKS]
        for kind in kinds[:: 1 if turn % 2 else -1]:
            killed.setdefault(kind, []).append(recovery(kind))
        for framework in FRAMEWORKS:
            pair = [framework, f"plain-{framework}"]
            for kind in pair[:: 1 if turn % 2 else -1]:
                steps.setdefault(kind, []).append(step(kind))
    rows = []
    for framework in FRAMEWORKS:
        what = f"{framework}: SIGKILL of one of 2 ranks until the step is done, against our loop"
        ratio = median(killed[framework]) / median(killed["loop"])
        rows.append(Row(what, ms(killed[framework]), ms(killed["loop"]), ratio, 1.3))
    for framework in FRAMEWORKS:
        ours, plain = steps[framework], steps[f"plain-{framework}"]
        ratios = [a / b for a, b in zip(ours, plain, strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        what = f"{framework}: a step with the adapter, against the plain Trainer"
        rows.append(Row(what, f"{ms(ours)}; {spread}", ms(plain), median(ratios), 1.01))
    return rows


def recovery(kind: str) -> float:
    """From the kill to the end of that step on both ranks, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), kind, STEPS_KILLED, KILL_AT)
        ((_, at),) = marks(Path(folder) / "killed-1")
        ends = [
            min(when for step, when in marks(Path(folder) / f"done-{rank}") if step == KILL_AT)
            for rank in range(2)
        ]
        return max(ends) - at


def step(kind: str) -> float:
    """The median time of a step, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), kind, STEPS_CALM, -1)
        ended = [when for _, when in marks(Path(folder) / "done-0")][WARM_UP:]
        return median(after - before for before, after in itertools.pairwise(ended))


def marks(path: Path) -> list[tuple[int, float]]:
    lines = (line.split() for line in path.read_text().splitlines())
    return [(int(number), float(when)) for number, when in lines]


def run(folder: Path, kind: str, steps: int, kill_at: int) -> None:
    framework = "lightning" if "lightning" in kind else "transformers"
    preload = f"{framework},transformers"
    if not kind.startswith("plain"):
        preload += ",taskd.torch" if kind == "loop" else f",taskd.integrations.{framework}"
    command = [str(PYTHON), "-m", "taskd", "run", "--nproc-per-node=2", f"--preload={preload}"]
    env = {"PYTHONPATH": str(ROOT / "src"), "KIND": kind, "STEPS": str(steps)}
    subprocess.run(
        [*command, str(ROOT / "tests/bench/trainers_train.py")],
        cwd=folder,
        env={**os.environ, **env, "KILL_AT": str(kill_at)},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
