"""Jobs of several nodes that start an etcd of their own: no node is special, node 0 included."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from taskd.agent.etcd_member.job_authority import issue
from taskd.agent.run.own_etcd import PORT_OFFSET
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdUnanswered
from taskd.config import environ
from taskd.runtime.address import free_port
from taskd.runtime.retry import Tries, every
from tests.integration.etcd.etcd_server import binary
from tests.integration.run.run_job import DEADLINE_S, TOKEN, Job, script
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_node_zero import lose, weights


class OwnCluster:
    """The launchers of one job, on one machine."""

    def __init__(self, folder: Path, nodes: int, *words: str) -> None:
        binary()
        self._folder, self._nodes, self._words = folder, nodes, words
        port = free_port()
        self.job = f"own{os.getpid()}-{port}"
        self.seed = f"127.0.0.1:{port + PORT_OFFSET}"
        ports = [f"--master-port={free_port()}", f"--manager-port={port}", f"--job-id={self.job}"]
        self._common = [f"--nnodes={nodes}", "--nproc-per-node=1", "--etcd=own", *ports]
        self.started: list[Job] = []

    def start(self, node: int, *words: str, **env: str) -> Job:
        folder = self._folder / f"node{len(self.started)}"
        folder.mkdir()
        spare = ["--spare"] if node >= self._nodes and "--witness" not in words else []
        rank = [] if "--witness" in words else [f"--node-rank={node}"]
        job = Job(folder, *self._common, *rank, *spare, *words, *self._words, **env)
        self.started.append(job)
        return job

    def wait_for_voters(self, count: int) -> None:
        asyncio.run(self._wait_for_voters(count))

    async def _wait_for_voters(self, count: int) -> None:
        folder = self._folder / "certificate"
        folder.mkdir(exist_ok=True)
        files = issue(TOKEN, self.job, ["127.0.0.1"], folder)
        client = EtcdClient([self.seed], files.client_settings(), call_s=5.0)
        async with asyncio.timeout(DEADLINE_S):
            async for _ in Tries(every(0.2)):
                try:
                    members = await client.members()
                except (EtcdUnanswered, EtcdBusy):
                    continue
                if sum(not one.is_learner for one in members) == count:
                    break
        await client.close()


@pytest.mark.skipif("TASKD_SOAK_FAULTS" not in environ, reason="`make soak` runs it")
@pytest.mark.timeout(300)
def test_spare_takes_over_the_ranks_of_node_zero(tmp_path: Path) -> None:
    path = script(tmp_path, SAME)
    cluster = OwnCluster(tmp_path, 3, "--strategies=recover", path, "0.8")
    zero, *others = [cluster.start(node) for node in range(4)]
    others[0].wait_for("step 5")
    cluster.wait_for_voters(3)
    lose(zero)
    ended = [job.end() for job in others]
    assert [each.code for each in ended] == [0, 0, 0], ended
    expected = weights(Job(tmp_path, "--nproc-per-node=3", path, "0").end().out)
    assert weights(*(each.out for each in ended)) == expected


def test_missing_etcd_is_reported_with_what_it_costs(tmp_path: Path) -> None:
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true")
    ended = cluster.start(0, TASKD_ETCD_MEMBER_BINARY="no-such-etcd").end()
    assert ended.code != 0
    assert "if node 0 is lost, the job waits for it" in ended.err
    assert "apt-get install etcd-server" in ended.err
