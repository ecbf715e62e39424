"""`taskd run` on two nodes: the same command for each node, here on one machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from taskd.agent.run.rendezvous import is_local_address
from taskd.runtime.address import free_port
from tests.integration.run.run_job import TRAIN, Job, script
from tests.integration.run.test_elastic import SAME, Nodes, kill

REMEDY = "set TASKD_TOKEN"


def nodes(folder: Path, *words: str, **env: str) -> list[Job]:
    ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
    jobs = []
    for node in range(2):
        node_folder = folder / f"node{node}"
        node_folder.mkdir()
        jobs.append(
            Job(
                node_folder,
                "--nnodes=2",
                f"--node-rank={node}",
                *ports,
                "--rdzv-id=two",
                *words,
                **env,
            )
        )
    return jobs


def test_two_nodes_train_together(tmp_path: Path) -> None:
    words = ["--insecure", "--nproc-per-node=2", script(tmp_path, TRAIN)]
    jobs = nodes(tmp_path, *words, TASKD_TOKEN="")
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0], ended
    assert "[rank 0]: weights" in ended[0].out
    assert [REMEDY in each.err for each in ended] == [True, False], (
        "only the node that listens warns"
    )
    assert "if node 0 is lost, the job waits for it and then ends" in ended[0].err


def test_rank_lost_on_one_node_restarts_both(tmp_path: Path) -> None:
    jobs = nodes(tmp_path, "--nproc-per-node=1", script(tmp_path, TRAIN), DIE="1.0.1")
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0], ended
    assert "attempt 1" in ended[0].out
    assert "rank 1.0 killed by signal 9, SIGKILL -> restart" in ended[1].err


def start_without_ranks(
    folder: Path, *words: str, host: str = "localhost", **env: str
) -> list[Job]:
    """torchrun's usual command for several machines: the same on each, without --node-rank."""
    endpoint = f"--rdzv-endpoint={host}:{free_port()}"
    rendezvous = ["--rdzv-backend=c10d", endpoint, "--rdzv-id=met", f"--manager-port={free_port()}"]
    jobs = []
    for node_folder in (folder / f"launcher{number}" for number in range(2)):
        node_folder.mkdir()
        jobs.append(Job(node_folder, "--nnodes=2", *rendezvous, *words, **env))
    return jobs


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_nodes_without_rank_draw_it(tmp_path: Path, host: str) -> None:
    if ":" in host and not is_local_address("::1"):
        pytest.skip("this machine has no IPv6")
    words = ["--nproc-per-node=2", "--rdzv-conf=join_timeout=80", script(tmp_path, TRAIN)]
    jobs = start_without_ranks(tmp_path, *words, host=host, DIE="3.0.1", TASKD_TOKEN="s3cret")
    ended = [job.end() for job in jobs]
    assert not any(REMEDY in each.err for each in ended)
    assert [each.code for each in ended] == [0, 0], ended
    assert "attempt 1" in ended[0].out + ended[1].out
    assert [each.err.count("this is node 1 of job met\n") for each in ended].count(1) == 1


def test_restarted_node_gets_its_drawn_rank_again(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        import os, signal
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("up as", os.environ["RANK"], flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    jobs = start_without_ranks(tmp_path, path)
    ranks = [job.wait_for("up as")[-1].split()[-1] for job in jobs]
    assert sorted(ranks) == ["0", "1"]
    first, second = (jobs[ranks.index(rank)] for rank in "01")
    second.popen.kill()
    second.popen.communicate()
    again = Job(second.folder, *second.words)
    ended = [job.end() for job in (first, again)]
    assert [each.code for each in ended] == [0, 0], ended
    assert "this is node 1 of job met\n" in ended[1].err


def test_missing_first_node_is_named(tmp_path: Path) -> None:
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{free_port()}",
        "--rdzv-id=alone",
    ]
    words = ["--nnodes=2", *rendezvous, "--rdzv-conf=is_host=false,join_timeout=3"]
    ended = Job(tmp_path, *words, script(tmp_path, "")).end()
    assert ended.code == 1
    assert "no first node answered at localhost:" in ended.err
    assert "--node-rank" in ended.err


def clusterd(folder: Path, port: int) -> subprocess.Popen[bytes]:
    words = [f"--listen=127.0.0.1:{port}", f"--journal={folder / 'journal'}"]
    return subprocess.Popen([sys.executable, "-m", "taskd", "clusterd", *words])


def test_job_finishes_although_every_part_is_killed_once(tmp_path: Path) -> None:
    """A rank, the manager, clusterd, another rank, and a whole node, one after another."""
    path, port = script(tmp_path, SAME), free_port()
    undisturbed = Job(tmp_path, "--nproc-per-node=4", path, "0").end()
    server = clusterd(tmp_path, port)
    try:
        nodes = Nodes(tmp_path, "--strategies=recover", f"--clusterd=127.0.0.1:{port}", path, "0.2")
        first, second = nodes.start(0), nodes.start(1)
        first.wait_for("step 5")
        second.worker(3).kill()
        first.wait_for("step 14")
        first.manager().kill()
        first.wait_for("step 22")
        server.kill()
        server.wait()
        server = clusterd(tmp_path, port)
        first.wait_for("step 30")
        first.worker(1).kill()
        first.wait_for("step 40")
        kill(second)
        again = nodes.start(1)
        ended = [launcher.end() for launcher in (first, again)]
    finally:
        server.kill()
        server.wait()
    assert [each.code for each in ended] == [0, 0], ended
    assert "manager exited: " in ended[0].err
    for lost in ("rank 3 (", "rank 1 (", "rank 2 (lost), rank 3 (lost)"):
        assert re.search(rf"{re.escape(lost)}.*recovered", ended[0].err), ended[0].err
    weights = [re.findall(r"weights \w+", out) for out in (ended[0].out, undisturbed.out)]
    assert weights[0] == weights[1] != []


def test_stopping_one_node_ends_job_on_both(tmp_path: Path) -> None:
    path = script(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    jobs = nodes(tmp_path, "--nproc-per-node=1", "--shutdown-timeout=5", path)
    for job in jobs:
        job.wait_for("up")
    jobs[0].signal(signal.SIGTERM)
    ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [1, 1], ended


def test_node_that_never_joins_is_named(tmp_path: Path) -> None:
    ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
    words = ["--nnodes=2", "--node-rank=0", *ports, "--join-timeout=3"]
    ended = Job(tmp_path, *words, script(tmp_path, "")).end()
    assert ended.code == 1
    assert re.search(r"nodes?\b.*\b1 did not", ended.err), ended.err


def test_missing_manager_is_named(tmp_path: Path) -> None:
    manager = free_port()
    ports = [f"--master-port={free_port()}", f"--manager-port={manager}"]
    words = ["--nnodes=2", "--node-rank=1", *ports, "--join-timeout=3"]
    ended = Job(tmp_path, *words, script(tmp_path, "")).end()
    assert ended.code == 1
    assert f"127.0.0.1:{manager}" in ended.err


def test_first_node_ends_its_manager_before_it_removes_its_folders(tmp_path: Path) -> None:
    """At SIGTERM, as a kubelet sends it, if that is not among the handled signals."""
    path = script(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    job = Job(tmp_path, "--signals-to-handle=SIGINT", f"--job-id=ended{os.getpid()}", path)
    job.wait_for("up")
    job.signal(signal.SIGTERM)
    _, err = job.popen.communicate()
    assert job.popen.returncode == 128 + signal.SIGTERM
    assert "journal" not in err
    assert "Exception" not in err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_killed_launcher_can_be_started_again(tmp_path: Path, signum: signal.Signals) -> None:
    """The agent and the proxy of a node die with its launcher; the job waits for the node.

    So they do at SIGTERM, as a kubelet sends it, if that is not among the handled signals.
    """
    path = script(
        tmp_path,
        """
        import os, pathlib, signal
        import torch.distributed as dist

        dist.init_process_group("gloo")
        print("up", flush=True)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            signal.pause()
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    port, manager = free_port(), free_port()
    words = ["--nnodes=2", f"--master-port={port}", f"--manager-port={manager}", "--rdzv-id=again"]
    words += ["--signals-to-handle=SIGINT"]
    folders = [tmp_path / f"node{node}" for node in range(2)]
    for folder in folders:
        folder.mkdir()
    first, second = (
        Job(folder, *words, f"--node-rank={node}", path) for node, folder in enumerate(folders)
    )
    first.wait_for("up")
    second.wait_for("up")
    second.signal(signum)
    _, err = second.popen.communicate()
    assert "Exception in callback" not in err
    again = Job(folders[1], *words, "--node-rank=1", path)
    ended = [job.end() for job in (first, again)]
    assert [each.code for each in ended] == [0, 0], ended


def test_second_launcher_of_same_node_is_refused(tmp_path: Path) -> None:
    path = script(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    job = Job(tmp_path, f"--job-id=only{os.getpid()}", path)
    job.wait_for("up")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = Job(elsewhere, f"--job-id=only{os.getpid()}", path).end()
    assert other.code == 1
    assert "another process already runs node 0 of job only" in other.err
    job.signal()
    job.end()
