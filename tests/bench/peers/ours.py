"""taskd: the protected script under four faults, and a script without taskd.

The summary that the job writes for each incident (summary.json in its state folder) splits the time
from the fault to the next step into its parts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.bench.peers.ports import free_ports
from tests.bench.peers.torchrun import SCRIPT
from tests.bench.peers.trial import (
    SURVIVE_LIMIT_S,
    VICTIM,
    Outcome,
    Trial,
    TrialError,
    survive,
    train_until_warm,
    watch,
)
from tests.bench.peers.workload import WORLD

PROTECTED = ROOT / "tests/bench/peers/train/protected.py"
STATE = "state"
HANG_LIMIT_S = 15.0
ACCOUNT_LIMIT_S = 10.0
STEPS_AROUND = 6
"""How many steps give the usual step time, or contain the pause that a fault has caused."""


@dataclass(frozen=True, slots=True)
class Incident:
    seconds: float
    """From the fault to the first step of all ranks."""
    parts: dict[str, float]
    """As the job reports it, in seconds: stopped, decided, forked, groups, state, step."""
    usual_step_s: float = 0.0
    """How long a step took before the fault, where that matters."""
    incidents: int = 1
    """How many the job has counted for this fault."""

    @property
    def seen(self) -> float:
        """From the fault to its detection: the part that the summary of the job cannot contain."""
        return max(0.0, self.seconds - sum(self.parts.values()))


def killed() -> Incident:
    with Trial() as job:
        _start(job, PROTECTED)
        outcome = survive(job)
        return Incident(outcome.seconds, _parts(job), incidents=len(_incidents(job)))


def hung() -> Incident:
    """A rank is stopped: no process exits, and the other ranks wait for it."""
    with Trial() as job:
        _start(job, PROTECTED)
        before = train_until_warm(job)
        ends = _full_steps(job, time.monotonic_ns(), STEPS_AROUND)
        hit_ns = time.monotonic_ns()
        os.kill(before[VICTIM].pid, signal.SIGSTOP)
        outcome = watch(job, hit_ns, before, HANG_LIMIT_S)
        usual_s = (ends[-1] - ends[0]) / (len(ends) - 1) / 1e9
        return Incident(outcome.seconds, _parts(job), usual_s)


def cut() -> Incident:
    """The links of one rank to the others break; no process is lost.

    The step in flight may still succeed on all ranks, so the first full step proves nothing. The
    repair is in the longest pause, and the step after that pause counts.
    """
    with Trial() as job:
        _start(job, PROTECTED)
        last = train_until_warm(job)
        cut_ns = time.monotonic_ns()
        os.kill(last[VICTIM].pid, signal.SIGUSR2)
        ends = [cut_ns, *_full_steps(job, cut_ns, STEPS_AROUND)]
        _, back_ns = max(pairwise(ends), key=lambda pause: pause[1] - pause[0])
        return Incident((back_ns - cut_ns) / 1e9, _parts(job))


def shrunk() -> Incident:
    """Two nodes: the launcher of the second is killed; the ranks of the first continue alone."""
    with Trial() as job:
        store, manager = map(str, free_ports(2))
        ports = ("--master-port", store, "--manager-port", manager)
        together = ("--nnodes", "2", "--insecure", *ports)
        words = (*together, "--job-id", job.folder.name, "--strategies", "elastic-training")
        _start(job, PROTECTED, WORLD // 2, *words)
        second = _start(job, PROTECTED, WORLD // 2, *words, "--node-rank", "1", name="second")
        train_until_warm(job)
        hit_ns = time.monotonic_ns()
        second.kill()
        back_ns = _full_steps(job, hit_ns, 1, WORLD // 2)[0]
        return Incident((back_ns - hit_ns) / 1e9, _parts(job))


def unmodified() -> Outcome:
    with Trial() as job:
        _start(job, SCRIPT)
        return survive(job)


def _start(
    job: Trial, script: Path, ranks: int = WORLD, *words: str, name: str = "job"
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "taskd", "run", "--nproc-per-node", str(ranks), *words]
    return job.start([*command, "--state-dir", job.folder / STATE, script], name=name)


def _full_steps(job: Trial, since_ns: int, count: int, world: int = WORLD) -> list[int]:
    """Times at which the first steps after `since_ns` were finished by all ranks of the world."""
    done: dict[int, dict[int, int]] = {}
    ends: list[int] = []
    for line in job.finished(SURVIVE_LIMIT_S):
        if line.at_ns > since_ns and line.world == world:
            ranks = done.setdefault(line.step, {})
            ranks[line.rank] = line.at_ns
            if len(ranks) == world:
                ends.append(max(ranks.values()))
        if len(ends) == count:
            break
    return ends


def _parts(job: Trial) -> dict[str, float]:
    """Look after each further step, until the summary of the incident is there.

    A death may be detected twice (a broken link, then a lost node): the second detection replaces
    the first, and has the summary.
    """
    try:
        for _ in job.finished(ACCOUNT_LIMIT_S):
            for one in _incidents(job):
                if one["outcome"] == "recovered":
                    return {name: ms / 1000 for name, ms in one["parts_ms"].items()}
    except TrialError as error:
        raise TrialError(f"recovered, but wrote no summary of it; {error}") from error
    raise AssertionError("finished() ends by returning a line or by raising")


def _incidents(job: Trial) -> list[dict[str, Any]]:
    summary = job.folder / STATE / "summary.json"
    found: list[dict[str, Any]] = []
    if summary.exists():
        found = json.loads(summary.read_text())["incidents"]
    return found
