"""The examples of the adapters with random kills: every file equals that of an undisturbed run.

`make soak` injects 20 faults into each. The seed chooses ranks, steps and moments.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import psutil
import pytest

from taskd.config import environ
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests import ROOT
from tests.adapters.test_lightning import content
from tests.adapters.test_transformers import LIMIT_S, PYTHON, without_times

FAULTS = int(environ.get("TASKD_SOAK_FAULTS", "4"))
SEED = environ.get("TASKD_CHAOS_SEED", "1")
RANKS = 2
WAIT_S = 120.0
MOMENT_S = 0.3
"""A kill comes up to so long after its step was reported: anywhere in the code of some steps."""
AGAIN = 0.25
"""Share of the kills after which the replacement is killed as well, in the repair or soon after."""


@dataclass(frozen=True)
class Example:
    script: str
    preload: str
    epochs: str
    """The text in the script that sets the number of epochs, before that number."""
    steps_per_epoch: int
    steps_per_fault: int
    """So many that the job still trains when the last fault comes, also with short steps."""
    results: str
    """The folder in which it leaves its results."""
    outcomes: frozenset[str] = frozenset({"recovered", "superseded"})
    """How its incidents may end."""
    options: str = ""
    """More arguments, which are written after the number of epochs."""


OURS = "taskd.integrations"
HF = Example("hf_trainer.py", f"{OURS}.transformers", "num_train_epochs=", 14, 60, "hf_trainer")
EXAMPLES = {
    "transformers": HF,
    "transformers, FSDP2": replace(
        HF,
        preload=f"tests.adapters.accelerate_on_cpu,{HF.preload}",
        options=", fsdp=True",
    ),
    "lightning": Example(
        "lightning_trainer.py", f"{OURS}.lightning", "max_epochs=", 30, 150, "lightning_logs"
    ),
}


class Job:
    """A running example, and what `taskd status --watch` says about it."""

    def __init__(self, folder: Path, name: str, epochs: int) -> None:
        self.folder, self.name, example = folder, f"chaos-{os.getpid()}", EXAMPLES[name]
        folder.mkdir()
        text = (ROOT / "examples/frameworks" / example.script).read_text()
        before, found, after = text.partition(example.epochs)
        assert found
        changed = f"{epochs}{example.options}{after.lstrip('0123456789')}"
        script = folder / example.script
        script.write_text(f"{before}{found}{changed}")
        path = f"{ROOT / 'src'}:{ROOT}"
        self._env = {**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)}
        folder.chmod(0o700)
        words = ["run", f"--nproc-per-node={RANKS}", f"--job-id={self.name}", "--state-dir=state"]
        words += [f"--preload={example.preload}", str(script)]
        self.log = folder / "run.log"
        with self.log.open("wb") as log:
            self.launcher = self._taskd(*words, stdout=log, stderr=log)

    def _taskd(self, *words: str, **kwargs: Any) -> subprocess.Popen[bytes]:
        command = [str(PYTHON), "-m", "taskd", *words]
        return subprocess.Popen(command, cwd=self.folder, env=self._env, **kwargs)

    def views(self) -> Iterator[dict[str, Any]]:
        """One view of the job after every change, until it ends."""
        for _ in Tries(every(0.1), deadline=monotonic() + WAIT_S):
            if "taskd status" in self.log.read_text() or self.launcher.poll() is not None:
                break
        with self._taskd(
            "status", self.name, "--watch", "--json", stdout=subprocess.PIPE
        ) as watching:
            assert watching.stdout is not None
            try:
                for line in watching.stdout:
                    yield json.loads(line)
            finally:
                watching.kill()

    def kill(self, rank: int, unless: int = 0) -> int | None:
        """Kill the process that is this rank, and is not `unless`; return its pid.

        None: the job is over. A rank that is killed after its script has ended is not replaced.
        """
        for _ in Tries(every(0.01), deadline=monotonic() + WAIT_S):
            if self.launcher.poll() is not None:
                return None
            for process in psutil.Process(self.launcher.pid).children(recursive=True):
                if process.pid != unless and _name(process.pid) == f"taskd:rank{rank}":
                    process.send_signal(signal.SIGKILL)
                    return process.pid
        raise AssertionError(f"rank {rank} has no process: {self.log.read_text()}")

    def end(self) -> str:
        assert self.launcher.wait(LIMIT_S + 10 * FAULTS) == 0, self.log.read_text()
        return self.log.read_text()


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def training(folder: Path, name: str) -> Iterator[Job]:
    job = Job(folder, name, epochs_of(name))
    try:
        yield job
    finally:
        job.launcher.terminate()
        job.launcher.wait(WAIT_S)


def epochs_of(name: str) -> int:
    example = EXAMPLES[name]
    return -(-example.steps_per_fault * (FAULTS + 1) // example.steps_per_epoch)


def disturb(job: Job, chance: Random, apart: int) -> int:
    """Kill ranks at random steps, one in each stretch of so many; return at how many.

    One rank always lives: it has the state.
    """
    killed = set[int | None]()
    steps = [chance.randrange(3 + number * apart, (number + 1) * apart) for number in range(FAULTS)]
    for view in job.views():
        is_whole = not killed & {rank["pid"] for rank in view["ranks"]}
        is_idle = view["line"]["state"] == "Idle" and is_whole
        if not steps or not is_idle or view["line"]["step"] < steps[0]:
            continue
        steps.pop(0)
        rank = chance.randrange(RANKS)
        Event().wait(chance.uniform(0, MOMENT_S))
        pid = job.kill(rank)
        killed.add(pid)
        if pid is not None and chance.random() < AGAIN:
            killed.add(job.kill(rank, unless=pid))
    return FAULTS - len(steps)


def results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "trainer_state.json":
            found[name] = without_times(json.loads(path.read_text()))
        elif path.suffix in (".ckpt", ".csv", ".yaml"):
            found[name] = content(path, folder)
        elif path.is_file() and path.name != ".metadata":
            found[name] = path.read_bytes()
    return found


@pytest.mark.timeout(2 * LIMIT_S + 30 * FAULTS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_random_kills_change_no_bit_of_the_results(name: str, tmp_path: Path) -> None:
    example, chance = EXAMPLES[name], Random(f"{SEED} {name}")
    with training(tmp_path / "calm", name) as job:
        job.end()
    with training(tmp_path / "disturbed", name) as job:
        kills = disturb(job, chance, example.steps_per_fault)
        log = job.end()
    assert kills == FAULTS, f"seed {SEED}: the job was over after {kills} kills\n{log}"
    summary = json.loads((tmp_path / "disturbed/state/summary.json").read_text())
    outcomes = {incident["outcome"] for incident in summary["incidents"]}
    assert "recovered" in outcomes <= example.outcomes, f"seed {SEED}: {log}"
    expected = results(tmp_path / "calm" / example.results)
    found = results(tmp_path / "disturbed" / example.results)
    assert found.keys() == expected.keys(), f"seed {SEED}: {log}"
    assert [each for each in expected if found[each] != expected[each]] == [], f"seed {SEED}: {log}"
