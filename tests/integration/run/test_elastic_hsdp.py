"""Sharded replicas with `taskd run`: a lost rank removes its whole replica, also on other nodes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.run.run_job import Job, script
from tests.integration.run.test_elastic import Nodes, kill, ledger

STEPS = 100
SHARDED = """
    import json, os, sys, threading

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import taskd.torch as taskd

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)
            )
            self.ledger = torch.nn.Parameter(torch.zeros(STEPS, job.world_size))

        def forward(self, batch, step, part):
            return (self.layers(batch) - batch).square().mean() - self.ledger[step, part]

    STEPS = int(sys.argv[1])
    job = taskd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (job.world_size // 2, 2), mesh_dim_names=("copy", "cut"))
    net = Net()
    fully_shard(net.layers, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.SGD(
        [
            {"params": net.layers.parameters(), "lr": 0.05, "momentum": 0.9},
            {"params": [net.ledger], "lr": 1.0},
        ]
    )
    job.protect(model=net, optimizer=optimizer, snapshot_every=0)
    print("incarnation", os.environ["TASKD_INCARNATION"], flush=True)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            for part in step.parts(net):
                seed = torch.Generator().manual_seed(100 * step + part)
                loss = net(torch.randn(8, 16, generator=seed), int(step), part)
                (loss * step.share).backward()
            optimizer.step()
            missing = job.world_size - len(job.members)
            threading.Event().wait(0.15 if missing else 0.01)
        if job.step > step:
            print(f"step {int(step)} with {len(job.members)} ranks", flush=True)
    whole = net.ledger.full_tensor().tolist()
    if job.rank == 0:
        print("ledger", json.dumps(whole), flush=True)
"""
"""Each pair of neighbors holds a replica; the ledger is explained in `test_elastic.py`."""


def is_complete(out: str, world: int) -> bool:
    """Each sample of each step has contributed exactly once, all with the same weight."""
    return ledger(out) == [[pytest.approx(1 / world)] * world] * STEPS


def test_lost_rank_removes_its_replica_for_a_moment(tmp_path: Path) -> None:
    path = script(tmp_path, SHARDED)
    job = Job(tmp_path, "--nproc-per-node=4", "--strategies=elastic-training", path, str(STEPS))
    job.wait_for("step 5 with 4 ranks")
    os.kill(job.worker(3).pid, signal.SIGKILL)
    job.wait_for("with 2 ranks")
    again = job.wait_for("with 4 ranks")
    ended = job.end()
    assert ended.code == 0, ended
    assert "rank 3 (" in ended.err
    assert "-> elastic-training: recovered" in ended.err
    assert {line for line in again if "incarnation" in line} == {
        f"[rank {r}]: incarnation 1\n" for r in (2, 3)
    }
    assert is_complete(ended.out, 4)


@pytest.mark.shows("HSDP (FSDP2 on a two-dimensional mesh)", "lost node")
def test_lost_node_removes_other_half_of_its_replica(tmp_path: Path) -> None:
    """Ranks 2 and 3 share a replica but not a node: if 3 is lost with its node, 2 has to leave."""
    path = script(tmp_path, SHARDED)
    nodes = Nodes(tmp_path, "--nproc-per-node=3", "--strategies=elastic-training", path, str(STEPS))
    first, second = nodes.start(0), nodes.start(1)
    first.wait_for("step 5 with 6 ranks")
    kill(second)
    first.wait_for("with 2 ranks")
    returning = nodes.start(1)
    again = first.wait_for("with 6 ranks")
    ended = [launcher.end() for launcher in (first, returning)]
    assert [each.code for each in ended] == [0, 0], ended
    lost = ", ".join(f"rank {rank} (lost)" for rank in (3, 4, 5))
    assert f"{lost} -> elastic-training: recovered" in ended[0].err
    assert [line for line in again if "incarnation" in line] == ["[rank 2]: incarnation 1\n"]
    assert is_complete(ended[0].out, 6)
