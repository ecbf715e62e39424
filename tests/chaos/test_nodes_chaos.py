"""Four machines, one of them a spare: nodes and processes are killed, stopped, cut off, returned.

Node 0 and the node that leads are preferred. The job starts an etcd by itself. Safety: the weights
equal those of an undisturbed run, no step is lost (the ranks are never restarted from the
beginning), and what the managers have written to etcd is the history of one leader after the other,
without a decision that is lost or made twice (`etcd_observer.py`).

`.ci/run` injects as many faults as fit into four minutes, `make soak` 1,000. The job never has more
faults at once than it promises to survive: the next one comes when it trains again, and a node or a
member of etcd is lost only while all machines run and etcd has a member on three of them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import sleep

import psutil
import pytest

from taskd.config import environ
from taskd.runtime.clock import monotonic
from taskd.runtime.retry import Tries, every
from tests import ROOT
from tests.chaos.etcd_observer import Change, problems, read
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import binary
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_half_jobs import Launcher
from tests.integration.run.test_node_zero import weights
from tests.integration.switched_machines import Machines, machines

NODES, SPARE = 3, 3
SOAK = "TASKD_SOAK_FAULTS" in environ
FAULTS = int(environ.get("TASKD_SOAK_FAULTS", "100"))
LIMIT_S = 60.0 * FAULTS if SOAK else 240.0
"""For the faults. The start of four nodes and the end take another minute on two cores."""
LEAST = 20
"""So many must fit into it."""
SEED = int(environ.get("TASKD_CHAOS_SEED", "1"))
STEPS = 10 * FAULTS
PACE_S = "0.15"
"""One step, so that the steps last until the last fault; the rest is done without a pause."""
PROGRESS = 2
"""How many steps the job must do after a fault before the next one."""
SLOWEST = 8
"""How many faults are shown with what they took."""
PATIENCE_S = 120.0
START_S = 300.0
"""Four nodes that start at once, on a machine that does other things, too."""
STOP_S, CUT_S = (0.2, 4.0), (0.3, 4.5)
"""How long a process is stopped, or a node cut off: shorter and longer than the leader's lease."""
WITHOUT_FILES = "without its files"
"""The machine is another one, or its container starts afresh: nothing there knows of the job."""
KILL_NODE, CUT, KILL, STOP = "kill the node", "cut off", "kill", "stop"
ANY_TIME = ("taskd.manager", "taskd:zygote", "taskd:rank", "taskd:rank", "taskd:standby")
WHOLE_ONLY = ("etcd", "taskd:etcd", "taskd:store")

pytestmark = [
    pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces"),
    pytest.mark.timeout(START_S + LIMIT_S + 4 * PATIENCE_S),
]


@dataclass
class Campaign:
    spaces: Machines
    folder: Path
    words: tuple[str, ...]
    random: Random
    stack: ExitStack
    launchers: dict[int, Launcher] = field(default_factory=dict)
    record: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the faults of each kind have taken, until the job trained again."""
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def start(self, machine: int) -> None:
        spare = ["--spare"] if machine == SPARE else []
        folder = self.folder / f"machine{machine}"
        folder.mkdir(exist_ok=True)
        words = [f"--nnodes={NODES}", *spare, "--strategies=retry,recover", *self.words]
        launcher = Launcher(self.spaces, machine, folder, *words, etcd="")
        self.stack.callback(launcher.close)
        self.launchers[machine] = launcher

    def observe(self) -> Path:
        """Follow what is written to etcd; returns the file."""
        path = self.folder / "history"
        path.touch()
        addresses = ",".join(f"{self.spaces.address(one)}:9603" for one in range(NODES))
        words = [f"half{os.getpid()}", "s", addresses, str(path)]
        python = [*self.spaces.inside_switch(), sys.executable, "-m", "tests.chaos.etcd_observer"]
        observer = subprocess.Popen([*python, *words], cwd=ROOT)
        self.stack.callback(observer.wait)
        self.stack.callback(observer.kill)
        return path

    def text(self) -> str:
        return "".join(one.out.read_text() for one in self.launchers.values())

    def errors(self) -> str:
        return "".join(one.err.read_text() for one in self.launchers.values())

    def step(self) -> int:
        return max(map(int, re.findall(r"step (\d+)", self.text())), default=0)

    def wait(self, what: str, condition: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
        for _ in Tries(every(0.1), deadline=monotonic() + within_s):
            if condition():
                return
            ended = [n for n, one in self.launchers.items() if one.popen.poll() is not None]
            assert not ended, f"machines {ended} have ended: {self.record} {self.errors()}"
        raise AssertionError(f"no {what}: {self.record} {self.errors()}")

    def wait_for_progress(self) -> None:
        step = self.step() + PROGRESS
        self.wait(f"step {step}", lambda: self.step() >= step)

    # The members of etcd, as each machine knows them

    def voters(self, machine: int) -> set[str]:
        """Empty: the machine has not joined since its launcher was started."""
        launcher = self.launchers[machine]
        for path in launcher.files.glob("etcd-*.json"):
            with suppress(OSError, ValueError):
                if path.stat().st_mtime > launcher.started_at:
                    return set(json.loads(path.read_text()))
        return set()

    def is_whole(self) -> bool:
        known = [self.voters(machine) for machine in self.launchers]
        return all(one == known[0] and len(one) == NODES for one in known)

    # Faults

    def leader(self) -> int:
        found = re.findall(r"node (\d+) leads the job since epoch (\d+)", self.errors())
        node = max(found, key=lambda one: int(one[1]))[0] if found else "0"
        return int(node) if int(node) in self.launchers else 0

    def disturb(self) -> None:
        """One fault. While a machine starts again, only processes of the others are disturbed."""
        random, whole = self.random, self.is_whole()
        victim = random.choice([0, self.leader(), *range(NODES + 1)])
        kind = random.choice((KILL_NODE, CUT, KILL, KILL, STOP) if whole else (KILL, KILL, STOP))
        name = random.choice((*ANY_TIME, *WHOLE_ONLY) if whole else ANY_TIME)
        at, began = self.step(), monotonic()
        if kind == KILL_NODE:
            name = random.choice(("", WITHOUT_FILES))
            self.kill_node(victim, with_files=not name)
        elif kind == CUT:
            name = ""
            self.spaces.cut(victim)
            sleep(random.uniform(*CUT_S))
            self.spaces.join(victim)
        elif not self.disturb_process(victim, name, kill=kind == KILL):
            return
        called = f"{kind} {name}".strip()
        self.kinds[called] += 1
        self.record.append(f"step {at}: {called} on machine {victim}")
        self.wait_for_progress()
        took_s = monotonic() - began
        self.seconds[called] += took_s
        self.record[-1] += f", {took_s:.1f} s{'' if whole else ' while a machine starts'}"
        self.slowest = sorted([*self.slowest, (took_s, self.record[-1])])[-SLOWEST:]

    def kill_node(self, victim: int, *, with_files: bool) -> None:
        launcher = self.launchers[victim]
        family = psutil.Process(launcher.popen.pid).children(recursive=True)
        launcher.close()
        _, alive = psutil.wait_procs(family, PATIENCE_S)
        assert not alive, f"left behind: {alive}"
        if not with_files:
            shutil.rmtree(launcher.files)
        self.start(victim)

    def disturb_process(self, victim: int, name: str, *, kill: bool) -> bool:
        """False: there is no such process at the moment."""
        launcher = self.launchers[victim]
        with suppress(psutil.NoSuchProcess, StopIteration):
            family = psutil.Process(launcher.popen.pid).children(recursive=True)
            process = next(one for one in family if _is_called(one, name))
            if kill:
                process.kill()
                return True
            process.suspend()
            try:
                sleep(self.random.uniform(*STOP_S))
            finally:
                process.resume()
            return True
        return False


def _is_called(process: psutil.Process, name: str) -> bool:
    if name == "taskd.manager":
        return name in process.cmdline()
    return process.name().startswith(name)


@pytest.mark.every_run
def test_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    binary()
    text = SAME.replace("job.steps(60)", f"job.steps({STEPS})")
    path = script(tmp_path, text.replace("float(sys.argv[1])", "float(open(sys.argv[1]).read())"))
    slow, fast = tmp_path / "pace", tmp_path / "fast"
    slow.write_text(PACE_S)
    fast.write_text("0")
    expected = weights(
        Job(tmp_path, "--nproc-per-node=3", path, str(fast)).end(PATIENCE_S + STEPS).out
    )
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(NODES + 1))
        campaign = Campaign(spaces, tmp_path, (path, str(slow)), Random(SEED), stack)
        for machine in range(NODES + 1):
            campaign.start(machine)
        history = campaign.observe()
        campaign.wait("first steps", lambda: campaign.step() >= PROGRESS, START_S)
        began = monotonic()
        while (
            campaign.kinds.total() < FAULTS
            and monotonic() < began + LIMIT_S
            and campaign.step() < STEPS - 10 * PROGRESS
        ):
            campaign.disturb()
        took_s = monotonic() - began
        campaign.wait("whole job", campaign.is_whole)
        fast.rename(slow)
        for launcher in campaign.launchers.values():
            launcher.popen.wait(PATIENCE_S + STEPS / 50)
        codes = [one.popen.returncode for one in campaign.launchers.values()]
        assert codes == [0] * len(codes), (campaign.record, campaign.errors())
        assert weights(campaign.text()) == expected != set(), campaign.record
        restarts = re.findall(r".*: restarted in .*", campaign.errors())
        assert not restarts, (campaign.record, restarts)
    written = read(history)
    assert not problems(written), (campaign.record, problems(written))
    leaders = sum(one.key == "leader" and not one.removed for one in written)
    mean_s = {kind: round(campaign.seconds[kind] / n, 1) for kind, n in campaign.kinds.items()}
    sys.stdout.write(
        f"{campaign.kinds.total()} faults in {took_s:.0f} s: {dict(campaign.kinds)}; "
        f"seconds until the job trained again: {mean_s}; slowest: {campaign.slowest[::-1]}; "
        f"{len(written)} changes in etcd by {leaders} leaders\n"
    )
    assert any(one.key.startswith("jobs/") for one in written)
    assert campaign.kinds.total() >= min(LEAST, FAULTS), campaign.record


def test_history_that_is_not_linearizable_is_found() -> None:
    first = [Change(1, "leader", epoch=1), Change(2, "jobs/a", epoch=1, sequence=1)]
    ended = Change(3, "leader", removed=True)
    second = [Change(4, "leader", epoch=2), Change(5, "jobs/a", epoch=2, sequence=2)]
    assert not problems([*first, ended, *second])
    assert problems([*first, *second]), "two leaders"
    assert problems([*first, ended, Change(4, "leader", epoch=1)]), "an epoch twice"
    assert problems([*first, ended, Change(4, "jobs/a", epoch=1, sequence=2)]), "no leader"
    assert problems([*first, ended, *second[:1], Change(5, "jobs/a", 1, 2)]), "the former leader"
    assert problems([*first, Change(3, "jobs/a", epoch=1, sequence=1)]), "a decision twice"
    assert problems([*first, Change(3, "jobs/a", epoch=1, sequence=3)]), "a decision is lost"
    assert problems([Change(9, "gap"), *first]), "not everything was read"
