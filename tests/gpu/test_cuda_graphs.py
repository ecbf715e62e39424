"""CUDA graphs: passes that do not communicate survive a fault; collectives and updates in a graph
are refused with the reason, and so is symmetric memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.run.run_job import Ended, run, script

TRAIN = """
    import hashlib, os, signal, sys

    kind, fault = sys.argv[1], int(sys.argv[2])
    rank = int(os.environ["RANK"])
    os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}

    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric
    from torch import nn

    import taskd.torch as taskd

    job = taskd.init("nccl")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    if kind == "passes":
        net = torch.cuda.make_graphed_callables(net, (torch.randn(32, 64, device="cuda"),))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    job.protect(model=model, optimizer=optimizer)
    if kind == "collective":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            dist.all_reduce(torch.ones(1, device="cuda"))
    if kind == "symmetric":
        symmetric.empty(4, dtype=torch.float32, device="cuda")
    for step in job.steps(40):
        for attempt in step:
            with attempt:
                batch = torch.randn(32, 64, device="cuda")
                (model(batch) - batch).square().mean().backward()
                if step == fault and rank == 1 and os.environ["TASKD_INCARNATION"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "update":
                    with torch.cuda.graph(torch.cuda.CUDAGraph()):
                        optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    if rank == 0:
        print("weights", digest.hexdigest())
"""


def train(folder: Path, kind: str, fault: int = -1) -> Ended:
    folder.mkdir()
    return run(folder, "--nproc-per-node", "2", script(folder, TRAIN), kind, str(fault))


def test_graphed_passes_survive_a_killed_rank(tmp_path: Path) -> None:
    calm, disturbed = train(tmp_path / "calm", "passes"), train(tmp_path / "killed", "passes", 20)
    assert "recover-in-place: recovered" in disturbed.err, disturbed.out + disturbed.err
    weights = [re.findall(r"weights \w+", ended.out) for ended in (calm, disturbed)]
    assert weights[0], calm.out + calm.err
    assert weights[1] == weights[0], disturbed.out + disturbed.err


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("collective", "allreduce in a CUDA graph cannot be protected"),
        ("update", "an update in a CUDA graph cannot be protected"),
        ("symmetric", "symmetric memory"),
    ],
)
def test_refused_use_ends_the_job_with_the_reason(tmp_path: Path, kind: str, reason: str) -> None:
    ended = train(tmp_path / "job", kind)
    assert ended.code != 0
    assert reason in ended.err, ended.out + ended.err
