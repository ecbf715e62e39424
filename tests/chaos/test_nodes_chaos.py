"""Four machines, one of them a spare: nodes and processes are killed, stopped, cut off, returned.

Node 0 and the node that leads are preferred. The job starts its own etcd. Safety: the weights equal
those of an undisturbed run, and no epoch has two leaders. `make soak` draws 1,000 faults.

The job never has more faults at once than it promises to survive: a node is lost only while all
machines run and etcd has a member on three of them. Everything else may fail at any moment.
"""

from __future__ import annotations

import json
import re
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
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import binary
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_half_jobs import Launcher
from tests.integration.run.test_node_zero import weights
from tests.integration.switched_machines import Machines, machines

NODES, SPARE = 3, 3
FAULTS = int(environ.get("TASKD_SOAK_FAULTS", "6"))
SEED = int(environ.get("TASKD_CHAOS_SEED", "1")) if "TASKD_SOAK_FAULTS" in environ else 1
"""Without `make soak` always the same few faults of processes: of etcd, the leader and others."""
STEPS = 15 * (FAULTS + 2)
PACE_S = "0.8"
"""One step. Slow, so that the steps last until the last fault; the rest is done without a pause."""
PROGRESS = 2
"""How many steps the job must do after a fault before the next one."""
PATIENCE_S = 120.0
START_S = 300.0
"""Four nodes that start at once, on a machine that does other things, too."""
KINDS = ("kill the node", "cut off", "kill a process", "kill a process", "stop a process")
PROCESSES = ("etcd", "taskd:etcd", "taskd:manager", "taskd:zygote", "taskd:rank", "taskd:rank")

pytestmark = [
    pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces"),
    pytest.mark.timeout(600 + 60 * FAULTS),
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

    def start(self, machine: int) -> None:
        spare = ["--spare"] if machine == SPARE else []
        folder = self.folder / f"machine{machine}"
        folder.mkdir(exist_ok=True)
        words = [f"--nnodes={NODES}", *spare, "--strategies=retry,recover", *self.words]
        launcher = Launcher(self.spaces, machine, folder, *words)
        self.stack.callback(launcher.close)
        self.launchers[machine] = launcher

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

    def is_replaced(self, machine: int) -> bool:
        prefix = f"{self.spaces.address(machine)}:"
        others = [self.voters(one) for one in self.launchers if one != machine]
        return not any(voter.startswith(prefix) for one in others for voter in one)

    # Faults

    def leader(self) -> int:
        found = re.findall(r"node (\d+) leads the job since epoch (\d+)", self.errors())
        node = max(found, key=lambda one: int(one[1]))[0] if found else "0"
        return int(node) if int(node) in self.launchers else 0

    def disturb(self) -> None:
        random = self.random
        victim = random.choice([0, self.leader(), *range(NODES + 1)])
        kind = random.choice(KINDS)
        name = random.choice(PROCESSES) if "process" in kind else ""
        if "taskd:" not in name or "etcd" in name:
            self.wait("whole job", self.is_whole)
        self.record.append(f"step {self.step()}: {kind} {name} on machine {victim}")
        match kind:
            case "kill the node":
                self.kill_node(victim)
            case "cut off":
                self.spaces.cut(victim)
                sleep(random.uniform(0.5, 5.0))
                self.spaces.join(victim)
            case _:
                self.disturb_process(victim, name, kill=kind.startswith("kill"))

    def kill_node(self, victim: int) -> None:
        launcher = self.launchers[victim]
        family = psutil.Process(launcher.popen.pid).children(recursive=True)
        launcher.close()
        _, alive = psutil.wait_procs(family, PATIENCE_S)
        assert not alive, f"left behind: {alive}"
        del self.launchers[victim]
        try:
            self.wait("change of the members", lambda: self.is_replaced(victim))
        finally:
            self.launchers[victim] = launcher
        self.start(victim)

    def disturb_process(self, victim: int, name: str, *, kill: bool) -> None:
        launcher = self.launchers[victim]
        family = psutil.Process(launcher.popen.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess, StopIteration):
            process = next(one for one in family if one.name().startswith(name))
            if kill:
                process.kill()
                return
            process.suspend()
            try:
                sleep(self.random.uniform(0.2, 4.0))
            finally:
                process.resume()


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
        campaign.wait("first steps", lambda: campaign.step() >= PROGRESS, START_S)
        for _ in range(FAULTS):
            campaign.disturb()
            campaign.wait_for_progress()
        campaign.wait("whole job", campaign.is_whole)
        fast.rename(slow)
        for launcher in campaign.launchers.values():
            launcher.popen.wait(PATIENCE_S)
        codes = [one.popen.returncode for one in campaign.launchers.values()]
        assert codes == [0] * len(codes), (campaign.record, campaign.errors())
        assert weights(campaign.text()) == expected != set(), campaign.record
        leaders = set(re.findall(r"node (\d+) leads the job since epoch (\d+)", campaign.errors()))
        epochs = [epoch for _, epoch in leaders]
        assert len(epochs) == len(set(epochs)), leaders
