"""Nodes are lost and come back with `taskd run`: the job shrinks by replicas and grows again."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from taskd.runtime.address import free_port
from tests.integration.run.run_job import Job, script

WORLD = 4
ELASTIC = """
    import json, sys, threading

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    STEPS = int(sys.argv[1])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
            )
            self.ledger = torch.nn.Parameter(torch.zeros(STEPS, job.world_size))

        def forward(self, batch, step, part):
            return (self.layers(batch) - batch).square().mean() - self.ledger[step, part]

    job = taskd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(
        [
            {"params": net.layers.parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": [net.ledger], "lr": 1.0},
        ]
    )
    job.protect(model=model, optimizer=optimizer, elastic=sys.argv[2])
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            for part in step.parts(model):
                seed = torch.Generator().manual_seed(100 * step + part)
                loss = model(torch.randn(8, 16, generator=seed), int(step), part)
                (loss * step.share).backward()
            optimizer.step()
            missing = job.world_size - len(job.members)
            threading.Event().wait(0.4 if missing else 0.01)
        if job.step > step:
            print(f"step {int(step)} with {len(job.members)} ranks", flush=True)
    if job.rank == 0:
        print("ledger", json.dumps(net.ledger.tolist()), flush=True)
"""
"""The model itself counts the samples: each sample that contributes adds its weight to one cell of
the ledger, through the same gradients, updates and repairs as all other weights. So the count stays
right even if a process dies between an update and its log line."""


SAME = """
    import hashlib, os, sys, threading

    import torch
    from torch.nn.parallel import DistributedDataParallel

    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 16),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    local, node = os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]
    print(f"local rank {local} of node {node}", flush=True)
    for step in job.steps(60):
        with step:
            batch = torch.randn(8, 16) + job.rank
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(float(sys.argv[1]))
        print(f"step {int(step)}", flush=True)
    state = torch.cat([tensor.flatten().double() for tensor in net.state_dict().values()])
    if job.rank == 0:
        print("weights", hashlib.sha256(state.numpy().tobytes()).hexdigest(), flush=True)
"""
"""Its result does not depend on which nodes run its four ranks."""


CROWDED = """
    import hashlib, sys, threading

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import taskd.torch as taskd

    job = taskd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("replicate", "shard"))
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    job.protect(model=net, optimizer=optimizer)
    for step in job.steps(60):
        with step:
            batch = torch.randn(8, 16) + job.rank
            (net(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            threading.Event().wait(float(sys.argv[1]))
        print(f"step {int(step)}", flush=True)
    parts = [tensor.full_tensor().flatten() for tensor in net.state_dict().values()]
    if job.rank == 0:
        print("weights", hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest(), flush=True)
"""
"""The user has put both replicas of each half of the model on one node."""


class Nodes:
    """Launchers of one job on one machine: the same command for each node."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._folder, self._words = folder, words
        ports = [f"--master-port={free_port()}", f"--manager-port={free_port()}"]
        self._common = ["--nnodes=2", "--nproc-per-node=2", *ports, f"--job-id={folder.name}"]
        self._count = 0

    def start(self, node: int, *options: str) -> Job:
        self._count += 1
        folder = self._folder / f"launcher{self._count}"
        folder.mkdir()
        return Job(folder, *self._common, f"--node-rank={node}", *options, *self._words)


def kill(launcher: Job) -> None:
    launcher.popen.kill()
    launcher.popen.communicate()


def ledger(out: str) -> list[list[float]]:
    text = next(line for line in out.splitlines() if "ledger" in line)
    rows: list[list[float]] = json.loads(text.split("ledger ")[1])
    return rows


def test_job_shrinks_when_node_is_lost_and_grows_when_it_returns(tmp_path: Path) -> None:
    path = script(tmp_path, ELASTIC)
    nodes = Nodes(tmp_path, "--strategies=elastic-training", path, "150", "accumulate")
    first, second = nodes.start(0), nodes.start(1)
    first.wait_for("step 5 with 4 ranks")
    kill(second)
    first.wait_for("with 2 ranks")
    again = nodes.start(1)
    first.wait_for("with 4 ranks")
    ended = [launcher.end() for launcher in (first, again)]
    assert [each.code for each in ended] == [0, 0], ended
    how = "(lost|silent)"  # on a busy machine its end may be noticed late
    shrunk = rf"rank 2 \({how}\), rank 3 \({how}\) -> elastic-training: recovered"
    assert re.search(shrunk, ended[0].err), ended[0].err
    assert ledger(ended[0].out) == [[1 / WORLD] * WORLD] * 150


@pytest.mark.shows("DDP", "lost node")
def test_spare_node_takes_over_ranks_of_lost_node(tmp_path: Path) -> None:
    path = script(tmp_path, SAME)
    undisturbed = Job(tmp_path, "--nproc-per-node=4", path, "0").end()
    nodes = Nodes(tmp_path, "--strategies=recover", path, "0.05")
    first, second, spare = nodes.start(0), nodes.start(1), nodes.start(0, "--spare")
    first.wait_for("step 5")
    kill(second)
    ended = [launcher.end() for launcher in (first, spare)]
    assert [each.code for each in ended] == [0, 0], ended
    assert "rank 2 (lost), rank 3 (lost) -> recover: recovered" in ended[0].err
    assert "[rank 2]: local rank 0 of node 1" in ended[1].out
    weights = [re.findall(r"weights \w+", out) for out in (ended[0].out, undisturbed.out)]
    assert weights[0] == weights[1] != []


def test_replicas_on_one_node_are_copied_to_another_node(tmp_path: Path) -> None:
    path = script(tmp_path, CROWDED)
    undisturbed = Job(tmp_path, "--nproc-per-node=4", path, "0").end()
    nodes = Nodes(tmp_path, "--strategies=recover", path, "0.05")
    first, second = nodes.start(0), nodes.start(1)
    first.wait_for("step 5")
    kill(second)
    again = nodes.start(1)
    ended = [launcher.end() for launcher in (first, again)]
    assert [each.code for each in ended] == [0, 0], ended
    assert "all replicas of a shard are on this node" in ended[0].err
    assert "step 0\n" not in ended[0].out  # training did not start again
    weights = [re.findall(r"weights \w+", out) for out in (ended[0].out, undisturbed.out)]
    assert weights[0] == weights[1] != []


@pytest.mark.parametrize("mode", ["accumulate", "scale"])
def test_job_shrinks_for_a_moment_when_rank_is_lost(mode: str, tmp_path: Path) -> None:
    path = script(tmp_path, ELASTIC)
    job = Job(tmp_path, "--nproc-per-node=4", "--strategies=elastic-training", path, "60", mode)
    job.wait_for("step 5 with 4 ranks")
    os.kill(job.worker(2).pid, signal.SIGKILL)
    job.wait_for("with 3 ranks")
    job.wait_for("with 4 ranks")
    ended = job.end()
    assert ended.code == 0, ended
    whole, scaled = [1 / WORLD] * WORLD, pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    rows = ledger(ended.out)
    if mode == "accumulate":
        assert rows == [pytest.approx(whole)] * 60
    else:
        assert all(row in (whole, scaled) for row in rows)
        assert any(row == scaled for row in rows)
