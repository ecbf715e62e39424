"""Node 0 is lost, with launcher, manager, clusterd, store and ranks: with etcd the job goes on."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from taskd.agent.run.plan import free_port
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


class Cluster:
    """The launchers of three nodes with two ranks each, and of spare nodes."""

    def __init__(self, folder: Path, etcd: EtcdServer, *words: str) -> None:
        self._folder = folder
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        job = f"--job-id=zero{os.getpid()}-{free_port()}"
        self._common = ["--nnodes=3", "--nproc-per-node=2", *ports, job, f"--etcd={etcd.client}"]
        self._words = words

    def start(self, node: int) -> Job:
        folder = self._folder / f"node{node}"
        folder.mkdir(exist_ok=True)
        spare = ["--spare"] if node >= 3 else []
        return Job(folder, *self._common, f"--node-rank={node}", *spare, *self._words)


def weights(*outputs: str) -> set[str]:
    return set(re.findall(r"weights \w+", "".join(outputs)))


def undisturbed(folder: Path, path: str) -> set[str]:
    found = weights(Job(folder, "--nproc-per-node=6", path, "0").end().out)
    assert found
    return found


def lose(job: Job) -> None:
    """Kill the launcher and everything that it has started, as the end of its machine does."""
    family = job.family()
    job.popen.kill()
    job.popen.communicate()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(family, timeout=60)


def test_spare_takes_over_the_ranks_of_node_zero(tmp_path: Path, etcd: EtcdServer) -> None:
    path = script(tmp_path, SAME)
    cluster = Cluster(tmp_path, etcd, "--strategies=recover", path, "0.05")
    zero, *others = [cluster.start(node) for node in range(4)]
    others[0].wait_for("step 5")
    lose(zero)
    ended = [job.end() for job in others]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert weights(*(each.out for each in ended)) == undisturbed(tmp_path, path)
    reports = "".join(each.err for each in ended)
    assert re.search(r"rank 0 \(lost\), rank 1 \(lost\) -> recover: recovered", reports), reports
