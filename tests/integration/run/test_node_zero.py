"""Node 0 is lost, with launcher, manager, clusterd, store and ranks: with etcd the job goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from taskd.runtime.address import free_port
from tests.integration import namespaces
from tests.integration.etcd.etcd_server import EtcdServer, running
from tests.integration.namespaces import Star, star
from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import SAME


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd") / "data") as server:
        yield server


class NamespaceJob(Job):
    def __init__(self, under: list[str], folder: Path, *words: str, **env: str) -> None:
        self.under = tuple(under)
        super().__init__(folder, *words, **env)


class Cluster:
    """The launchers of three nodes with two ranks each, and of spare nodes."""

    def __init__(
        self, folder: Path, etcd: EtcdServer, *words: str, machines: Star | None = None
    ) -> None:
        """`machines`: each node in its own network namespace."""
        self._folder, self._machines = folder, machines
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        self.job = f"zero{os.getpid()}-{free_port()}"
        job = [f"--job-id={self.job}", f"--etcd={etcd.client}"]
        self._common = ["--nnodes=3", "--nproc-per-node=2", *ports, *job]
        if machines is not None:
            self._common.append(f"--master-addr={machines.address(0)}")
        self._words = words

    def start(self, node: int) -> Job:
        folder = self._folder / f"node{node}"
        folder.mkdir(exist_ok=True)
        spare = ["--spare"] if node >= 3 else []
        words = [*self._common, f"--node-rank={node}", *spare, *self._words]
        if self._machines is None:
            return Job(folder, *words)
        return NamespaceJob(
            self._machines.inside(self._machines.nodes[node]),
            folder,
            *words,
            GLOO_SOCKET_IFNAME="eth0",
        )


def weights(*outputs: str) -> set[str]:
    return set(re.findall(r"weights \w+", "".join(outputs)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The weights of SAME without any fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = weights(Job(folder, "--nproc-per-node=6", script(folder, SAME), "0").end().out)
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


def read_error(job: Job, pattern: str) -> re.Match[str]:
    """The first line of the launcher's own output that matches."""
    assert job.popen.stderr is not None
    seen = []
    for line in job.popen.stderr:
        seen.append(line)
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"no {pattern!r} in {seen}")


TRAIN = """
    import threading

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    job = taskd.init()
    seed = torch.tensor([1000 + job.rank])
    dist.broadcast(seed, 0)
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(80):
        with step:
            for part in step.parts(model):
                model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(0.05)
        print(f"step {int(step)} with {len(job.members)} ranks, seed {seed.item()}", flush=True)
"""
"""Each rank prints what rank 0 has sent it in the set-up."""


def test_spare_takes_over_the_ranks_of_node_zero(
    tmp_path: Path, etcd: EtcdServer, undisturbed: set[str]
) -> None:
    path = script(tmp_path, SAME)
    cluster = Cluster(tmp_path, etcd, "--strategies=recover", path, "0.05")
    zero, *others = [cluster.start(node) for node in range(4)]
    others[0].wait_for("step 5")
    lose(zero)
    ended = [job.end() for job in others]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert weights(*(each.out for each in ended)) == undisturbed
    reports = "".join(each.err for each in ended)
    assert re.search(r"rank 0 \(lost\), rank 1 \(lost\) -> recover: recovered", reports), reports


def test_job_shrinks_without_node_zero_and_a_later_replacement_knows_the_set_up(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    path = script(tmp_path, TRAIN)
    cluster = Cluster(tmp_path, etcd, "--strategies=elastic-training,recover-in-place", path)
    zero, first, second = [cluster.start(node) for node in range(3)]
    first.wait_for("step 5 with 6 ranks")
    lose(zero)
    for job in (first, second):
        job.wait_for("step 40 with 4 ranks")  # the first incident is over
    second.worker(5).kill()
    ended = [job.end() for job in (first, second)]
    assert [each.code for each in ended] == [0, 0], ended
    assert "[rank 5]: step 79 with 4 ranks, seed 1000\n" in ended[1].out
    assert "seed 1005" not in ended[1].out, "the replacement got what rank 0 had sent"
    reports = "".join(each.err for each in ended)
    assert "rank 0 (lost), rank 1 (lost) -> elastic-training: recovered" in reports, reports
    assert re.search(r"rank 5 \(.*recover-in-place: recovered", reports), reports


def replay(job: str, leader: Job) -> list[dict[str, object]]:
    """What `taskd replay` says on the machine of the leader."""
    done = subprocess.run(
        [sys.executable, "-m", "taskd", "replay", job, "--json"],
        env={**os.environ, "TMPDIR": str(leader.temporary)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_incidents_of_former_leaders_are_shown(tmp_path: Path, etcd: EtcdServer) -> None:
    path = script(tmp_path, SAME)
    cluster = Cluster(tmp_path, etcd, "--strategies=recover", path, "0.2")
    zero, *others = [cluster.start(node) for node in range(4)]
    others[0].wait_for("step 5")
    others[1].worker(5).kill()
    others[0].wait_for("step 10")
    lose(zero)
    leader = int(read_error(others[0], r"node (\d) leads the job since epoch 2")[1])
    others[0].wait_for("step 20")
    decisions = replay(cluster.job, others[leader - 1])
    assert {1, 2} <= {decision["incident"] for decision in decisions}, decisions
    ended = [job.end() for job in others]
    assert [each.code for each in ended] == [0, 0, 0], ended
    reports = "".join(each.err for each in ended)
    assert ["2 faults" in each.err for each in ended] == [True] * 3, reports  # on each node
    assert re.search(r"incident 1: rank 5 \(signal 9", reports), reports


def test_stopped_leader_harms_nothing_when_it_wakes(
    tmp_path: Path, etcd: EtcdServer, undisturbed: set[str]
) -> None:
    path = script(tmp_path, SAME)
    cluster = Cluster(tmp_path, etcd, "--strategies=recover", path, "0.2")
    jobs = [cluster.start(node) for node in range(3)]
    zero, first, second = jobs
    first.wait_for("step 5")
    stopped = zero.manager()
    stopped.send_signal(signal.SIGSTOP)
    leader = read_error(first, r"node (\d) leads the job since epoch 2")
    assert leader[1] in "12"
    second.worker(5).kill()
    first.wait_for("step 12")
    stopped.send_signal(signal.SIGCONT)
    assert stopped.wait(60) in (3, None), "it has noticed that it does not lead"
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert weights(*(each.out for each in ended)) == undisturbed


def test_ctrl_c_on_another_node_ends_the_job_after_node_zero_was_lost(
    tmp_path: Path, etcd: EtcdServer
) -> None:
    path = script(tmp_path, SAME)
    cluster = Cluster(tmp_path, etcd, "--strategies=recover", "--shutdown-timeout=5", path, "0.1")
    zero, first, second, spare = [cluster.start(node) for node in range(4)]
    first.wait_for("step 5")
    lose(zero)
    spare.wait_for("step 12")
    second.signal(signal.SIGINT)
    ended = [job.end() for job in (first, second, spare)]
    assert [each.code for each in ended] == [1, 1, 1], ended
    assert "node 2 was stopped by SIGINT" in "".join(each.err for each in ended)


@pytest.mark.skipif(not namespaces.possible(), reason="needs root and network namespaces")
def test_silent_node_zero_is_replaced_and_acts_no_more(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    path = script(tmp_path, SAME)
    with ExitStack() as stack:
        machines = stack.enter_context(star(4))
        server = EtcdServer(
            tmp_path / "etcd",
            client=f"{machines.hub_address}:2379",
            under=tuple(machines.inside(machines.hub)),
        )
        server.start()
        stack.callback(server.kill)
        words = ("--strategies=recover", path, "0.05")
        cluster = Cluster(tmp_path, server, *words, machines=machines)
        zero, *others = [cluster.start(node) for node in range(4)]
        stack.callback(lose, zero)
        others[0].wait_for("step 5")
        machines.cut(0)
        ended = [job.end() for job in others]
        assert [each.code for each in ended] == [0, 0, 0], ended
        reports = "".join(each.err for each in ended)
        assert "rank 0 (silent), rank 1 (silent) -> recover: recovered" in reports, reports
        assert zero.popen.poll() is None, "it waits, and does not act"
    found = weights(*(each.out for each in ended))
    assert found == undisturbed
