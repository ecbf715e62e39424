"""A device that computes wrong gradients is found, named and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.run.run_job import Ended, script
from tests.integration.run.run_job import run as job_run

TRAIN = """
    import hashlib, os
    import torch
    import torch.distributed as dist
    import taskd.torch as taskd

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    job = taskd.init()
    torch.manual_seed(3 + job.rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Tanh(), torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 8),
    )
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = int(os.environ.get("VERIFY", "2"))
    kind = os.environ.get("KIND", "")
    job.protect(model=model, optimizer=optimizer, verify_every=every)
    broken, begin, end = map(int, os.environ.get("FLIP", "-1 0 0").split())
    is_first = not job.is_replacement or kind == "broken for ever"

    def flip(module, args, output):
        if job.rank == broken and is_first and begin <= job.step < end:
            wrong = output.detach().clone()
            wrong.view(torch.int32)[1, 3] ^= 1 << 22
            return output + (wrong - output.detach())

    net[0].register_forward_hook(flip)
    calls = 0

    def forward_backward(batch):
        global calls
        calls += 1
        loss = model(batch).square().mean()
        if kind == "depends on its calls":
            loss = loss * calls
        if kind == "communicates":
            loss = loss + dist.get_rank() * 0
            dist.all_reduce(loss.detach().clone())
        if kind == "depends on the rank":
            loss = loss * (1 + job.rank)
        loss.backward()
        return loss.item()

    for step in job.steps(int(os.environ.get("STEPS", "9"))):
        for attempt in step:
            with attempt:
                optimizer.zero_grad()
                step.verified(forward_backward, torch.randn(8, 16) + job.rank)
                optimizer.step()
    tensors = [*net.state_dict().values()]
    state = b"".join(one.detach().numpy().tobytes() for one in tensors)
    print("calls", calls, "weights", hashlib.sha256(state).hexdigest(), flush=True)
"""
RANKS = "--nproc-per-node=4"


def weights(ended: Ended) -> list[str]:
    assert ended.code == 0, ended.err + ended.out
    return [line.split("weights ")[1] for line in ended.out.splitlines() if "weights" in line]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same training without checks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found = weights(job_run(folder, RANKS, script(folder, TRAIN), VERIFY="0"))
    assert len(set(found)) == 1
    assert len(found) == 4
    return found


def test_wrong_gradient_is_found_and_its_rank_replaced(
    undisturbed: list[str], tmp_path: Path
) -> None:
    ended = job_run(tmp_path, RANKS, script(tmp_path, TRAIN), FLIP="2 4 9")
    assert weights(ended) == undisturbed
    assert "incident 1: rank 2 (miscomputed) -> recover-in-place: recovered" in ended.err
    assert "incident 2" not in ended.err


def test_device_that_stays_broken_is_isolated(tmp_path: Path) -> None:
    """No spare node is there: the job continues without the rank."""
    flip = {"FLIP": "1 4 9", "KIND": "broken for ever"}
    ended = job_run(tmp_path, RANKS, script(tmp_path, TRAIN), **flip)
    assert len(weights(ended)) == 3
    assert "incident 1 to 2: rank 1 (miscomputed) -> elastic-training: recovered" in ended.err


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("depends on its calls", "is not deterministic, or depends on"),
        ("communicates", "communicates (allreduce at"),
        ("depends on the rank", "depends on more than its arguments"),
    ],
)
def test_pass_that_cannot_be_repeated_is_not_verified(
    kind: str, reason: str, tmp_path: Path
) -> None:
    ended = job_run(tmp_path, RANKS, script(tmp_path, TRAIN), KIND=kind)
    assert len(weights(ended)) == 4
    assert "incident" not in ended.err
    assert reason in ended.err + ended.out
