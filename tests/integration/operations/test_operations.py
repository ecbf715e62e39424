"""Operations on a running job of four real ranks: faults found, cuts survived, weights the same."""

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
    """A job, and the commands that a person types beside it, wherever it runs."""

    def __init__(self, job: str, processes: list[subprocess.Popen[str]], inside: list[str]) -> None:
        self.job, self.processes, self._inside = job, processes, inside

    def taskd(self, *words: str) -> tuple[int, str]:
        with self.start(*words) as asked:
            try:
                out, _ = asked.communicate(timeout=DEADLINE_S)
            finally:
                asked.kill()
        return asked.returncode, out

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._inside, *TASKD, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first view of the job of which that is true."""
        watching = self.start("status", self.job, "--watch", "--json")
        assert watching.stdout is not None
        seen = ""
        try:
            for seen in watching.stdout:
                view = json.loads(seen) if seen.startswith("{") else {}
                if view and happened(view):
                    return view
        finally:
            watching.kill()
            watching.wait()
            watching.stdout.close()
        raise AssertionError(f"the job ended before that; last seen: {seen}")

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
    told = {**os.environ, **SHORT, "TASKD_TOKEN": "secret", **env}
    processes = []
    for node in range(2 if spaces else 1):
        where: list[str] = []
        words = ["--nproc-per-node", "4"]
        if spaces is not None:
            where = spaces.inside((spaces.a, spaces.b)[node])
            address = spaces.address(spaces.a, 1)
            words = ["--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(node)]
            words += ["--master-addr", address, "--master-port", "29511"]
        command = [*where, *TASKD, "run", *words, "--job-id", job, *options, TRAIN]
        processes.append(
            subprocess.Popen(
                [*command, str(steps), str(pace_s)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=told,
                cwd=folder,
            )
        )
    inside = [] if spaces is None else spaces.inside(spaces.a)
    try:
        first = processes[0].stdout
        assert first is not None
        while "taskd status" not in (line := first.readline()):
            assert line, "the job ended before it began"
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


def test_a_test_in_the_middle_changes_no_weight(undisturbed: str) -> None:
    with running(TASKD_STRESS_SLOW_FACTOR="1000") as job:  # the machine may be busy
        job.at_step(10)
        first = job.start("stress", job.job)
        job.until(lambda view: view["line"]["state"] == "StressTesting")
        code, text = job.taskd("stress", job.job)
        assert code == 1
        assert "411" in text
        told, _ = first.communicate(timeout=DEADLINE_S)
        assert first.returncode == 0, told
        assert told.count("passed") == 8
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed


def test_a_rank_that_dies_in_the_test_is_replaced_and_training_goes_on(undisturbed: str) -> None:
    with running(TASKD_STRESS_COMPUTE_S="20") as job:
        job.at_step(10)
        asked = job.start("stress", job.job, "--ops", "compute")
        view = job.until(lambda view: view["line"]["state"] == "StressTesting")
        (pid,) = (rank["pid"] for rank in view["ranks"] if rank.get("rank") == 2)
        os.kill(pid, signal.SIGKILL)
        told, _ = asked.communicate(timeout=DEADLINE_S)
        assert asked.returncode == 2
        assert "recv fault, when stressing test" in told
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed


def test_a_flipped_bit_is_found_and_its_node_is_not_used_again() -> None:
    with running(steps=100_000, TASKD_STRESS_INJECT="flip:2") as job:
        job.at_step(5)
        code, told = job.taskd("stress", job.job, "--ops", "compute")
        assert code == 2
        assert told.count("FAULT") == 1
        assert "products were wrong" in told
        codes, out = job.end()
    # There is no other node: rather no training than training on a device that lies.
    assert codes == [1]
    assert "failed a stress test" in out


def test_a_slow_link_is_found() -> None:
    with running(steps=100_000, TASKD_STRESS_INJECT="slow:0-3") as job:
        job.at_step(5)
        code, told = job.taskd("stress", job.job, "--ops", "p2p")
    assert code == 2
    assert "link 0-3" in told
    assert told.count("FAULT") == 1


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_a_slow_cable_is_found_by_its_bytes() -> None:
    with (
        namespaces.two_machines() as spaces,
        running("--nics", "eth0,eth1", steps=100_000, spaces=spaces) as job,
    ):
        job.at_step(5)
        spaces.shape(0, "40mbit")
        code, told = job.taskd("stress", job.job, "--ops", "p2p")
    assert code == 2, told
    crossing = [line for line in told.splitlines() if "FAULT" in line]
    assert len(crossing) == 2, told
    assert all("MB/s towards rank" in line for line in crossing), told
    assert "link 0-1" not in told
    assert "link 2-3" not in told


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_a_node_that_lies_is_sent_home_and_the_others_go_on() -> None:
    words = ("--nics", "eth0,eth1", "--strategies", "retry,elastic-training,exit")
    with (
        namespaces.two_machines() as spaces,
        running(*words, spaces=spaces, TASKD_STRESS_INJECT="flip:2") as job,
    ):
        job.at_step(10)
        code, told = job.taskd("stress", job.job, "--nodes", "node1", "--ops", "compute")
        assert code == 2
        assert "isolate node:node1" in told
        assert told.count("passed") == 1, told  # of the node's two devices one is well
        job.until(lambda view: view["line"].get("world") == 2)
        codes, out = job.end()
    assert codes[0] == 0, out
    assert "150 steps" in out


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_links_move_and_come_back_and_a_cut_of_the_idle_one_is_not_noticed(
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
def test_a_dead_primary_is_left_by_itself_and_no_process_restarts(undisturbed: str) -> None:
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
def test_without_failover_a_dead_primary_ends_the_job_with_a_checkpoint_and_the_reason(
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
    with running(pace_s=0.0, folder=tmp_path) as job:  # elsewhere, with all links
        codes, out = job.end()
    assert codes == [0]
    assert weights(out) == undisturbed
