"""The manager is killed with SIGKILL: training continues, and its restart repairs the job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.run.run_job import Ended, Job, script

TRAIN = """
    import hashlib, os, sys
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP
    import taskd.torch as taskd

    torch.set_num_threads(1)
    rank, incarnation = int(os.environ["RANK"]), os.environ["TASKD_INCARNATION"]
    torch.manual_seed(7 + rank)
    job = taskd.init()
    net = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))
    model = fully_shard(net) if "SHARD" in os.environ else DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    gates = {int(at): os.path.join(os.environ["GATES"], at) for at in os.environ["AT"].split(",")}
    for step in job.steps(40):
        if rank == 0 and int(step) in gates and incarnation == "0":
            print("at", int(step), flush=True)
            with open(gates.pop(int(step))) as gate:  # a pipe: waits for the test
                gate.read()
        with step:
            optimizer.zero_grad()
            data = torch.Generator().manual_seed(int(step) * 100 + rank)
            model(torch.randn(8, 16, generator=data)).square().mean().backward()
            optimizer.step()
    local = (getattr(p, "_local_tensor", p) for p in net.parameters())
    weights = b"".join(p.detach().numpy().tobytes() for p in local)
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
"""


class Stage:
    """A job that stops at chosen steps until the test lets it continue."""

    def __init__(self, folder: Path, *at: int, clusterd: str = "", **env: str) -> None:
        self.gates = folder / "gates"
        self.gates.mkdir(parents=True)
        for step in at:
            os.mkfifo(self.gates / str(step))
        words = ("--nproc-per-node", "3", "--clusterd", clusterd, script(folder, TRAIN))
        steps = ",".join(map(str, at)) or "-1"
        self.job = Job(folder, *words, GATES=str(self.gates), AT=steps, **env)

    def reach(self, step: int) -> None:
        self.job.wait_for(f"at {step}")

    def go_on(self, step: int) -> None:
        (self.gates / str(step)).write_text("")

    def end(self) -> tuple[Ended, set[str]]:
        ended = self.job.end()
        weights = {line.split()[-1] for line in ended.out.splitlines() if "weights" in line}
        return ended, weights


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)
    psutil.wait_procs([process], timeout=30)


def test_training_continues_without_the_manager(tmp_path: Path) -> None:
    _, undisturbed = Stage(tmp_path / "plain").end()
    stage = Stage(tmp_path / "killed", 5)
    stage.reach(5)
    ranks = [stage.job.worker(rank).pid for rank in range(3)]

    kill(stage.job.manager())
    stage.go_on(5)
    ended, weights = stage.end()

    assert ended.code == 0, ended.err
    assert weights == undisturbed
    assert len(ranks) == 3
    assert "0 faults" in ended.err


def test_restarted_manager_repairs_the_job(tmp_path: Path) -> None:
    _, undisturbed = Stage(tmp_path / "plain").end()
    stage = Stage(tmp_path / "killed", 5, 15)
    stage.reach(5)
    kill(stage.job.manager())
    stage.go_on(5)
    stage.reach(15)
    kill(stage.job.worker(2))
    stage.go_on(15)
    ended, weights = stage.end()

    assert ended.code == 0, ended.err
    assert weights == undisturbed
    assert "recover-in-place" in ended.err


@pytest.mark.parametrize("env", [{}, {"SHARD": "1"}], ids=["replicas", "shards"])
def test_manager_and_a_rank_die_together(tmp_path: Path, env: dict[str, str]) -> None:
    _, undisturbed = Stage(tmp_path / "plain", **env).end()
    stage = Stage(tmp_path / "killed", 5, **env)
    stage.reach(5)
    manager, rank = stage.job.manager(), stage.job.worker(1)
    manager.send_signal(signal.SIGKILL)
    kill(rank)
    stage.go_on(5)
    ended, weights = stage.end()

    assert ended.code == 0, ended.err
    assert weights == undisturbed
    assert "restarted" not in ended.err


def test_manager_dies_repeatedly_during_repairs(tmp_path: Path) -> None:
    _, undisturbed = Stage(tmp_path / "plain").end()
    steps = (5, 10, 15, 20, 25)
    stage = Stage(tmp_path / "killed", *steps)
    for number, step in enumerate(steps):
        stage.reach(step)
        rank = stage.job.worker(1 + number % 2)
        stage.go_on(step)
        rank.send_signal(signal.SIGKILL)
        psutil.wait_procs([rank], timeout=30)
        # By now the manager is somewhere between the report and the repair.
        kill(stage.job.manager())
    ended, weights = stage.end()

    assert ended.code == 0, ended.err
    assert weights == undisturbed
    incidents = re.findall(r"^taskd:   incident .*", ended.err, re.MULTILINE)
    lost = re.findall(r"rank (\d) \(signal 9", "".join(incidents))
    assert lost == ["1", "2", "1", "2", "1"], ended.err


class Server:
    """A separate clusterd on a fixed port that can be restarted."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._journal = folder / "journal"
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ("clusterd", "--listen", self.address, "--journal", str(self._journal))
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "taskd", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        assert self._popen is not None
        self._popen.kill()
        self._popen.wait(30)


def test_clusterd_dies_with_a_rank_and_decides_after_its_restart(tmp_path: Path) -> None:
    _, undisturbed = Stage(tmp_path / "plain").end()
    server = Server(tmp_path)
    server.start()
    try:
        stage = Stage(tmp_path / "killed", 5, clusterd=server.address)
        stage.reach(5)
        server.kill()
        kill(stage.job.worker(1))
        stage.go_on(5)
        server.start()
        ended, weights = stage.end()
    finally:
        server.kill()

    assert ended.code == 0, ended.err
    assert weights == undisturbed
    assert "recover-in-place" in ended.err
