"""Operations on a running job of four real ranks: faults are found, the weights stay the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.integration import namespaces
from tests.integration.namespaces import Namespaces

TASKD = (sys.executable, "-m", "taskd")
TRAIN = str(ROOT / "examples/train_ddp.py")
DEADLINE_S = 120.0
SHORT = {"TASKD_STRESS_COMPUTE_S": "1", "TASKD_STRESS_P2P_MB": "2"}


class Running:
    """A running job, and the commands that a person runs at the same time."""

    def __init__(self, job: str, processes: list[subprocess.Popen[str]], inside: list[str]) -> None:
        self.job, self.processes, self._inside = job, processes, inside

    def taskd(self, *words: str) -> tuple[int, str]:
        with self.start(*words) as command:
            try:
                out, _ = command.communicate(timeout=DEADLINE_S)
            finally:
                command.kill()
        return command.returncode, out

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._inside, *TASKD, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first view of the job that fulfills the condition."""
        watching = self.start("status", self.job, "--watch", "--json")
        assert watching.stdout is not None
        seen = ""
        try:
            for seen in watching.stdout:
                view = json.loads(seen) if seen.startswith("{") else {}
                if view and condition(view):
                    return view
        finally:
            watching.kill()
            watching.wait()
            watching.stdout.close()
        raise AssertionError(f"the job ended before the condition was fulfilled; last line: {seen}")

    def at_step(self, step: int) -> dict[str, Any]:
        return self.until(lambda view: int(view["line"].get("step", 0)) >= step)

    def end(self) -> tuple[list[int], str]:
        outs = [process.communicate(timeout=DEADLINE_S)[0] for process in self.processes]
        return [process.returncode for process in self.processes], "".join(outs)


def weights(out: str) -> str:
    return next(line.rsplit(" ", 1)[-1] for line in out.splitlines() if "weights" in line)


@contextmanager
def running(
    *options: str,
    steps: int = 150,
    pace_s: float = 0.1,
    spaces: Namespaces | None = None,
    folder: Path = ROOT,
    **env: str,
) -> Iterator[Running]:
    """Four ranks on this machine, or two on each of two machines made of namespaces."""
    job = f"operations-{os.getpid()}-{os.urandom(3).hex()}"
    job_env = {**os.environ, **SHORT, "TASKD_TOKEN": "secret", **env}
    processes = []
    for node in range(2 if spaces else 1):
        prefix: list[str] = []
        words = ["--nproc-per-node", "4"]
        if spaces is not None:
            prefix = spaces.inside((spaces.a, spaces.b)[node])
            address = spaces.address(spaces.a, 1)
            words = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
            words += ["--master-addr", address, "--master-port", "29511"]
        command = [*prefix, *TASKD, "run", *words, "--job-id", job, *options, TRAIN]
        processes.append(
            subprocess.Popen(
                [*command, str(steps), str(pace_s)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=job_env,
                cwd=folder,
            )
        )
    inside = [] if spaces is None else spaces.inside(spaces.a)
    try:
        first = processes[0].stdout
        assert first is not None
        while "taskd status" not in (line := first.readline()):
            assert line, "the job ended before it had started"
        yield Running(job, processes, inside)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    with running(steps=150, pace_s=0.0) as job:
        codes, out = job.end()
    assert codes == [0]
    return weights(out)


def test_stress_test_during_training_does_not_change_weights(undisturbed: str) -> None:
    # No device counts as slow on a loaded machine.
    with running(TASKD_STRESS_SLOW_FACTOR="1000", TASKD_STRESS_COMPUTE_S="5") as job:
        job.at_step(10)
        first = job.start("stress", job.job)
        job.until(lambda view: view["line"]["state"] == "StressTesting")
        code, text = job.taskd("stress", job.job)
        assert code == 1
        assert "411" in text
        output, _ = first.communicate(timeout=DEADLINE_S)
        assert first.returncode == 0, output
        assert output.count("passed") == 8
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed


def test_rank_that_dies_during_stress_test_is_replaced(undisturbed: str) -> None:
    with running(TASKD_STRESS_COMPUTE_S="20") as job:
        job.at_step(10)
        command = job.start("stress", job.job, "--ops", "compute")
        view = job.until(lambda view: view["line"]["state"] == "StressTesting")
        (pid,) = (rank["pid"] for rank in view["ranks"] if rank.get("rank") == 2)
        os.kill(pid, signal.SIGKILL)
        output, _ = command.communicate(timeout=DEADLINE_S)
        assert command.returncode == 2
        assert "recv fault, when stressing test" in output
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed


def test_node_with_flipped_bit_is_not_used_again() -> None:
    with running(steps=100_000, TASKD_STRESS_INJECT="flip:2") as job:
        job.at_step(5)
        code, output = job.taskd("stress", job.job, "--ops", "compute")
        assert code == 2
        assert output.count("FAULT") == 1
        assert "products were wrong" in output
        codes, out = job.end()
    # There is no other node, and training must not continue on a faulty device.
    assert codes == [1]
    assert "failed a stress test" in out


def test_slow_link_is_found() -> None:
    with running(steps=100_000, TASKD_STRESS_INJECT="slow:0-3") as job:
        job.at_step(5)
        code, output = job.taskd("stress", job.job, "--ops", "p2p")
    assert code == 2
    assert "link 0-3" in output
    assert output.count("FAULT") == 1


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_slow_cable_is_found_by_its_throughput() -> None:
    with (
        namespaces.two_machines() as spaces,
        running("--nics", "eth0,eth1", steps=100_000, spaces=spaces) as job,
    ):
        job.at_step(5)
        spaces.shape(0, "40mbit")
        code, output = job.taskd("stress", job.job, "--ops", "p2p")
    assert code == 2, output
    crossing = [line for line in output.splitlines() if "FAULT" in line]
    assert len(crossing) == 2, output
    assert all("MB/s to rank" in line for line in crossing), output
    assert "link 0-1" not in output
    assert "link 2-3" not in output


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_faulty_node_is_isolated_and_other_nodes_continue() -> None:
    words = ("--nics", "eth0,eth1", "--strategies", "retry,elastic-training,exit")
    with (
        namespaces.two_machines() as spaces,
        running(*words, spaces=spaces, TASKD_STRESS_INJECT="flip:2") as job,
    ):
        job.at_step(10)
        code, output = job.taskd("stress", job.job, "--nodes", "node1", "--ops", "compute")
        assert code == 2
        assert "isolate node:node1" in output
        assert output.count("passed") == 1, output  # one of the node's two devices is healthy
        job.until(lambda view: view["line"].get("world") == 2)
        codes, out = job.end()
    assert codes[0] == 0, out
    assert "150 steps" in out


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_links_switch_and_switch_back_and_cut_of_idle_link_has_no_effect(
    undisturbed: str,
) -> None:
    with (
        namespaces.two_machines() as spaces,
        running("--nics", "eth0,eth1", spaces=spaces) as job,
    ):
        job.at_step(10)
        assert job.taskd("nic", job.job, "--to", "backup") == (0, "switch nic finish\n")
        spaces.cut(0)
        view = job.at_step(60)
        assert int(view["line"]["incident"]) == 1
        spaces.join(0)
        assert job.taskd("nic", job.job, "--to", "primary") == (0, "switch nic finish\n")
        codes, out = job.end()
    assert codes == [0, 0]
    assert weights(out) == undisturbed


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_failover_leaves_dead_primary_link_without_restart(undisturbed: str) -> None:
    with (
        namespaces.two_machines() as spaces,
        running("--nics", "eth0,eth1", "--nic-failover", spaces=spaces) as job,
    ):
        before = job.at_step(10)
        spaces.cut(0)
        after = job.at_step(int(before["line"]["step"]) + 60)
        assert [r["pid"] for r in before["ranks"]] == [r["pid"] for r in after["ranks"]]
        codes, out = job.end()
    assert codes == [0, 0]
    assert "-> retry: recovered" in out
    assert weights(out) == undisturbed


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_without_failover_dead_primary_link_ends_job_with_checkpoint_and_reason(
    undisturbed: str, tmp_path: Path
) -> None:
    with (
        namespaces.two_machines() as spaces,
        running("--nics", "eth0,eth1", spaces=spaces, folder=tmp_path) as job,
    ):
        job.at_step(10)
        spaces.cut(0)
        codes, out = job.end()
    assert codes == [1, 1]
    assert "eth0 has no carrier" in out
    assert list(tmp_path.glob("*/step-*/taskd.json")), out
    with running(pace_s=0.0, folder=tmp_path) as job:  # on one machine, where all links work
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed
