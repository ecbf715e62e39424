"""Four machines, one of them a spare: nodes and processes are killed, stopped, cut off, returned.

Node 0 and the node that leads are preferred. The job starts its own etcd. Safety: the weights equal
those of an undisturbed run, and no epoch has two leaders. `make soak` runs 1,000 faults.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import sleep

import psutil
import pytest

from taskd.config import environ
from taskd.runtime.retry import Tries, every
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import binary
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_half_jobs import Launcher
from tests.integration.run.test_node_zero import weights
from tests.integration.switched_machines import Machines, machines

NODES, SPARE = 3, 3
FAULTS = int(environ.get("TASKD_SOAK_FAULTS", "4"))
STEPS_PER_FAULT = 30
STEPS = STEPS_PER_FAULT * (FAULTS + 2)
KINDS = ("kill the node", "cut off", "kill a process", "stop a process")
PROCESSES = ("etcd", "taskd:etcd", "taskd:manager", "taskd:zygote", "taskd:rank")

pytestmark = [
    pytest.mark.skipif("TASKD_SOAK_FAULTS" not in environ, reason="`make soak` runs it"),
    pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces"),
    pytest.mark.timeout(120 + 60 * FAULTS),
]


@dataclass
class Campaign:
    spaces: Machines
    folder: Path
    path: str
    random: Random
    stack: ExitStack
    launchers: dict[int, Launcher] = field(default_factory=dict)
    outputs: list[Launcher] = field(default_factory=list)

    def start(self, machine: int) -> None:
        spare = ["--spare"] if machine == SPARE else []
        folder = self.folder / f"run{len(self.outputs)}"
        folder.mkdir()
        words = [f"--nnodes={NODES}", *spare, "--strategies=retry,recover", self.path, "0.05"]
        launcher = Launcher(self.spaces, machine, folder, *words)
        self.stack.callback(launcher.close)
        self.launchers[machine] = launcher
        self.outputs.append(launcher)

    def text(self) -> str:
        return "".join(one.out.read_text() for one in self.outputs)

    def errors(self) -> str:
        return "".join(one.err.read_text() for one in self.outputs)

    def wait_for_step(self, step: int) -> None:
        for _ in Tries(every(0.1)):
            if max(map(int, re.findall(r"step (\d+)", self.text())), default=0) >= step:
                return
            living = [one for one in self.launchers.values() if one.popen.poll() is None]
            assert living, self.errors()

    def leader(self) -> int:
        found = re.findall(r"node (\d+) leads the job since epoch (\d+)", self.errors())
        node = max(found, key=lambda one: int(one[1]))[0] if found else "0"
        return int(node) if int(node) in self.launchers else 0

    def disturb(self) -> str:
        random = self.random
        victim = random.choice([0, self.leader(), *range(NODES + 1)])
        kind = random.choice(KINDS)
        launcher = self.launchers[victim]
        family = psutil.Process(launcher.popen.pid).children(recursive=True)
        match kind:
            case "kill the node":
                launcher.close()
                psutil.wait_procs(family, 60)
                sleep(random.uniform(0.5, 2.0))
                self.start(victim)
            case "cut off":
                self.spaces.cut(victim)
                sleep(random.uniform(0.5, 5.0))
                self.spaces.join(victim)
            case _:
                name = random.choice(PROCESSES)
                with suppress(psutil.NoSuchProcess, StopIteration):
                    process = next(one for one in family if one.name().startswith(name))
                    kind = f"{kind}: {name}"
                    if kind.startswith("kill"):
                        process.kill()
                    else:
                        process.suspend()
                        sleep(random.uniform(0.2, 4.0))
                        process.resume()
        return f"{kind} on machine {victim}"


@pytest.mark.parametrize("seed", [1])
def test_weights_are_those_of_an_undisturbed_run(tmp_path: Path, seed: int) -> None:
    binary()
    path = script(tmp_path, SAME.replace("job.steps(60)", f"job.steps({STEPS})"))
    expected = weights(Job(tmp_path, "--nproc-per-node=3", path, "0").end().out)
    record = []
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(NODES + 1))
        campaign = Campaign(spaces, tmp_path, path, Random(seed), stack)
        for machine in range(NODES + 1):
            campaign.start(machine)
        for fault in range(FAULTS):
            campaign.wait_for_step(STEPS_PER_FAULT * (fault + 1))
            record.append(campaign.disturb())
        campaign.wait_for_step(STEPS - 1)
        for launcher in campaign.launchers.values():
            launcher.popen.wait()
        codes = [one.popen.returncode for one in campaign.launchers.values()]
        assert codes == [0] * len(codes), (record, campaign.errors())
        assert weights(campaign.text()) == expected, record
        leaders = set(re.findall(r"node (\d+) leads the job since epoch (\d+)", campaign.errors()))
        epochs = [epoch for _, epoch in leaders]
        assert len(epochs) == len(set(epochs)), leaders
