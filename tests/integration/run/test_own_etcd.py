"""Jobs of several nodes with an etcd of their own: no node is special, node 0 included."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from taskd.agent.etcd_member.etcd_binary import COST
from taskd.agent.etcd_member.job_authority import issue
from taskd.agent.run.own_etcd import PORT_OFFSET
from taskd.clusterd.etcd.etcd_client import EtcdClient
from taskd.clusterd.etcd.etcd_errors import EtcdBusy, EtcdUnanswered
from taskd.config import environ
from taskd.runtime.address import Address, free_port
from taskd.runtime.retry import Tries, every
from tests.integration.etcd.etcd_server import binary
from tests.integration.run.run_job import DEADLINE_S, TOKEN, Job, script, training
from tests.integration.run.test_elastic import SAME
from tests.integration.run.test_node_zero import lose, read_error, weights

NO_BINARY = {"TASKD_ETCD_MEMBER_BINARY": "no-such-etcd"}


class OwnCluster:
    """The launchers of one job, on one machine."""

    def __init__(self, folder: Path, nodes: int, *words: str, etcd: str = "") -> None:
        """`etcd`: the option of that name; empty: the nodes choose."""
        binary()
        self._folder, self._nodes, self._words = folder, nodes, words
        port = free_port()
        self.job = f"own{os.getpid()}-{port}"
        self.seed = f"127.0.0.1:{port + PORT_OFFSET}"
        ports = [f"--master-port={free_port()}", f"--manager-port={port}", f"--job-id={self.job}"]
        option = [f"--etcd={etcd}"] if etcd else []
        self._common = [f"--nnodes={nodes}", "--nproc-per-node=1", *option, *ports]
        self.started: list[Job] = []

    def start(self, node: int, *words: str, **env: str) -> Job:
        folder = self._folder / f"node{len(self.started)}"
        folder.mkdir()
        spare = ["--spare"] if node >= self._nodes and "--witness" not in words else []
        rank = [] if "--witness" in words or node < 0 else [f"--node-rank={node}"]
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


@pytest.mark.parametrize(
    ("node", "has", "words", "because"),
    [
        (0, NO_BINARY, (), "node 0 must start it, and cannot: no-such-etcd is not installed"),
        (2, NO_BINARY, (), "only 2 of 3 nodes can keep a copy"),
        (1, {}, ("--etcd=none",), "node 1 cannot use it: it was started with --etcd none"),
    ],
)
def test_all_nodes_do_without_if_one_of_them_must(
    tmp_path: Path, node: int, has: dict[str, str], words: tuple[str, ...], because: str
) -> None:
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true")
    special = cluster.start(node, *words, **has)
    jobs = [special if each == node else cluster.start(each) for each in range(3)]
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert f"{COST}. The job starts no etcd: {because}" in ended[0].err
    assert all("keeps the job's state" not in each.err for each in ended[1:]), ended


BROKEN = """#!/bin/sh
if [ "$1" = --version ]; then exec etcd --version; fi
echo '{"level":"fatal","error":"this etcd is broken"}'
exit 1
"""


@pytest.mark.parametrize("broken", [(0,), (1, 2)])
def test_etcd_that_does_not_start_keeps_no_job_from_running(
    tmp_path: Path, broken: tuple[int, ...]
) -> None:
    binary = tmp_path / "etcd"
    binary.write_text(BROKEN)
    binary.chmod(0o755)
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true")
    has = {"TASKD_ETCD_MEMBER_BINARY": str(binary)}
    jobs = [cluster.start(node, **(has if node in broken else {})) for node in range(3)]
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0, 0], ended
    said = f"{COST}. The job starts no etcd: node 0 cannot use it: the job's etcd has not answered"
    assert (said in ended[0].err) == (0 in broken), ended
    assert ("this etcd is broken" in ended[0].err) == (0 in broken), ended


@pytest.mark.parametrize("silent", [False, True])
def test_other_program_at_the_port_of_etcd_keeps_no_job_from_running(
    tmp_path: Path, silent: bool
) -> None:
    """Its kernel accepts connections, and it never answers; or it refuses them."""
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true")
    port = Address.parse(cluster.seed).port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        if silent:
            other.listen(1000)
        ended = [job.end() for job in [cluster.start(node) for node in range(3)]]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert f"node 0 cannot use it: port {port}" in ended[0].err


@pytest.mark.timeout(300)
def test_node_zero_is_started_again_in_a_job_without_etcd(tmp_path: Path) -> None:
    """It has lost its files, and the others have no reason to say what they have."""
    cluster = OwnCluster(tmp_path, 3, training(tmp_path, 100_000))
    zero, *others = [cluster.start(node, **(NO_BINARY if node == 2 else {})) for node in range(3)]
    for job in (zero, *others):
        job.wait_for("with 3 ranks")
    lose(zero)
    again = cluster.start(0)
    again.wait_for("with 3 ranks")
    again.signal()
    ended = [job.end() for job in (again, *others)]
    assert "The job starts no etcd: the job runs without it" in ended[0].err


@pytest.mark.timeout(300)
def test_nodes_that_draw_their_ranks_choose_first(tmp_path: Path) -> None:
    path = script(tmp_path, "import os; print('rank', os.environ['RANK'], flush=True)")
    endpoint = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    cluster = OwnCluster(tmp_path, 3, *endpoint, "--local-addr=127.0.0.1", path)
    ended = [job.end() for job in [cluster.start(-1) for _ in range(3)]]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert sorted(each.out for each in ended) == [f"[rank {n}]: rank {n}\n" for n in range(3)]
    assert all("keeps the job's state" not in each.err for each in ended), ended


def test_signal_ends_nodes_that_wait_for_others(tmp_path: Path) -> None:
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true")
    zero, one = cluster.start(0), cluster.start(1)
    read_error(zero, r"waiting for 1 of 3 nodes \(node 1 has come\)")
    one.signal()
    ended = [job.end() for job in (zero, one)]
    assert [each.code for each in ended] == [1, 1], ended
    assert all("node 1 was stopped by SIGTERM" in each.err for each in ended), ended


def test_nodes_that_do_not_come_are_counted(tmp_path: Path) -> None:
    cluster = OwnCluster(tmp_path, 3, "--join-timeout=3", "--no-python", "true")
    ended = cluster.start(0).end()
    assert ended.code == 1
    assert "2 of 3 nodes did not start within 3 s" in ended.err


def test_missing_node_zero_is_named(tmp_path: Path) -> None:
    cluster = OwnCluster(tmp_path, 3, "--join-timeout=3", "--no-python", "true")
    ended = cluster.start(1).end()
    assert ended.code == 1
    assert f"node 0 did not answer within 3 s, neither at {cluster.seed}" in ended.err


def test_missing_etcd_is_reported_with_what_it_costs(tmp_path: Path) -> None:
    cluster = OwnCluster(tmp_path, 3, "--no-python", "true", etcd="own")
    ended = cluster.start(0, **NO_BINARY).end()
    assert ended.code != 0
    assert "if node 0 is lost, the job waits for it" in ended.err
    assert "apt-get install etcd-server" in ended.err
