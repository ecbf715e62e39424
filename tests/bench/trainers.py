"""The adapters for Trainers: recovery against our own loop, and steps against the plain Trainer.

The same model, data, optimizer and number of ranks in all. The kinds take turns, so that a busy
minute of the machine affects all of them. It needs the environment of `make test-adapters`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests import ROOT
from tests.bench.rows import Row, ms
from tests.bench.torch_step import Turns, estimate

PYTHON = ROOT / ".venvs/adapters/bin/python"
FRAMEWORKS = ("transformers", "lightning")
ROUNDS = 1 if os.environ.get("TASKD_BENCH_QUICK") else 5
STEPS_KILLED, KILL_AT = 16, 8
PAIRS, PAIRS_SMALL = (30, 30) if os.environ.get("TASKD_BENCH_QUICK") else (400, 600)
LIMIT_S = 300.0
NOTES = f"""
How this was measured: a GPT-2 of a million parameters, batches of 8 texts of 64 words, AdamW with a
schedule, clipping, 2 ranks over gloo, one thread each. *Killed*: rank 1 kills itself in the forward
pass of step {KILL_AT}; the time ends when both ranks have finished that step. *A step*: a Trainer
with the adapter and a plain one take turns after each step, in one process, with one model and one
optimizer, so that other load and addresses affect both equally; the ratio is the median over the
pairs of steps, with its 95 % confidence interval. A tiny model, whose step is little more than the
Trainer's own work, gives the cost in microseconds.
"""


def measure() -> list[Row]:
    if not PYTHON.exists():
        return []
    killed: dict[str, list[float]] = {}
    for turn in range(ROUNDS):
        kinds = ["loop", *FRAMEWORKS]
        for kind in kinds[:: 1 if turn % 2 else -1]:
            killed.setdefault(kind, []).append(recovery(kind))
    rows = []
    for framework in FRAMEWORKS:
        what = f"{framework}: SIGKILL of one of 2 ranks until the step is done, against our loop"
        ratio = median(killed[framework]) / median(killed["loop"])
        rows.append(Row(what, ms(killed[framework]), ms(killed["loop"]), ratio, 1.3))
    for framework in FRAMEWORKS:
        rows += calm_steps(framework)
    return rows


def calm_steps(framework: str) -> Iterator[Row]:
    ours, plain = pairs(framework, "usual", PAIRS)
    for clock, what in enumerate(("a step", "CPU time of a step, all threads,")):
        with_adapter, without = ([turn[clock] for turn in turns] for turns in (ours, plain))
        ratio = estimate([a / b for a, b in zip(with_adapter, without, strict=True)])
        yield Row(
            f"{framework}: {what} with the adapter, against the plain Trainer",
            f"{(ratio.middle - 1) * median(without) * 1e6:+.0f} µs ({ratio}; {ratio.size} pairs)",
            ms(without),
            ratio.middle,
            target=None if clock else 1.01,
        )
    ours, plain = pairs(framework, "small", PAIRS_SMALL)
    more = estimate([(a - b) * 1e6 for (_, a), (_, b) in zip(ours, plain, strict=True)])
    yield Row(
        f"{framework}: the same CPU time with a tiny model: what the adapter adds to every step",
        f"{more.middle:+.0f} µs (95 %: {more.low:.0f} to {more.high:.0f})",
        ms([turn[1] for turn in plain]),
    )


def recovery(kind: str) -> float:
    """From the kill to the end of that step on both ranks, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        adapter = "taskd.torch" if kind == "loop" else f"taskd.integrations.{kind}"
        framework = "transformers" if kind == "loop" else kind
        preload = f"{framework},transformers,{adapter}"
        env = {"KIND": kind, "STEPS": str(STEPS_KILLED), "KILL_AT": str(KILL_AT)}
        run(Path(folder), "trainers_train.py", preload, env)
        ((_, at),) = marks(Path(folder) / "killed-1")
        ends = [
            min(when for step, when in marks(Path(folder) / f"done-{rank}") if step == KILL_AT)
            for rank in range(2)
        ]
        return max(ends) - at


def pairs(framework: str, size: str, count: int) -> tuple[Turns, Turns]:
    """Steps with the adapter and without: wall time and processor time of each."""
    with tempfile.TemporaryDirectory() as folder:
        preload = f"{framework},transformers,taskd.integrations.{framework}"
        env = {"FRAMEWORK": framework, "SIZE": size, "PAIRS": str(count)}
        run(Path(folder), "trainers_pairs.py", preload, env)
        times = json.loads((Path(folder) / "result").read_text())
    return times["ours"], times["plain"]


def marks(path: Path) -> list[tuple[int, float]]:
    lines = (line.split() for line in path.read_text().splitlines())
    return [(int(number), float(when)) for number, when in lines]


def run(folder: Path, script: str, preload: str, env: dict[str, str]) -> None:
    command = [str(PYTHON), "-m", "taskd", "run", "--nproc-per-node=2", f"--preload={preload}"]
    subprocess.run(
        [*command, str(ROOT / "tests/bench" / script)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", **env},
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
