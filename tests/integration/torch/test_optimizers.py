"""Optimizers of every kind: their state is transferred, and a lost step never reaches them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

import taskd.torch as taskd
from taskd.errors import SettingsError
from taskd.torch.state.protected import Protected
from tests.integration.torch.runs import assert_same, ends, run
from tests.integration.torch.scripts import (
    CLASSES,
    WIDTH,
    batch,
    closure,
    digest,
    inject_fault,
    seed,
)

STEPS = 6
ADAMW = torch.optim.AdamW


@pytest.mark.parametrize(
    ("kind", "moment"),
    [("kills", "in backward"), ("cuts", "in backward"), ("cuts", "after backward")],
)
def test_step_in_a_closure_is_replayed(kind: str, moment: str, tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", closure, steps=STEPS, optimizer=ADAMW))
    faults: dict[str, Any] = {kind: [(1, 0, 3, moment)]}
    assert_same(calm, run(tmp_path / "run", closure, steps=STEPS, optimizer=ADAMW, **faults))


def two_passes(args: dict[str, Any]) -> None:
    """As SAM: the weights are moved, another pass follows, and they are moved back."""
    seed(1234)
    job = taskd.init()
    net = nn.Linear(WIDTH, CLASSES)
    model = DistributedDataParallel(net)
    optimizer = ADAMW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    data, target = batch(args["rank"], 0)
    for step in job.steps(STEPS):
        with step:
            before = [one.detach().clone() for one in model.parameters()]
            for number in range(2):
                optimizer.zero_grad()
                output = model(data)
                moment = f"in pass {number}"
                output.register_hook(lambda g, step=step, moment=moment: _kill(args, step, moment))
                torch.autograd.backward(nn.functional.cross_entropy(output, target))
                with torch.no_grad():
                    for weight, old in zip(model.parameters(), before, strict=True):
                        assert weight.grad is not None
                        weight.add_(weight.grad) if number == 0 else weight.copy_(old)
            optimizer.step()
    torch.save(digest(net, optimizer), Path(args["folder"]) / f"end-{args['rank']}.pt")


def sparse(args: dict[str, Any]) -> None:
    """A table of words whose gradient is sparse."""
    seed(1234)
    job = taskd.init()
    net = nn.EmbeddingBag(20, CLASSES, sparse=True)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SparseAdam([*model.parameters()], lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(STEPS):
        with step:
            optimizer.zero_grad()
            words = torch.randint(20, (4, 3))
            output = model(words)
            output.register_hook(lambda g, step=step: _kill(args, step, "in backward"))
            torch.autograd.backward(nn.functional.cross_entropy(output, words[:, 0] % CLASSES))
            optimizer.step()  # type: ignore[no-untyped-call]
    torch.save(digest(net, optimizer), Path(args["folder"]) / f"end-{args['rank']}.pt")


def test_sparse_gradients_are_replayed(tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", sparse, size=2))
    kills = [(1, 0, 3, "in backward")]
    assert_same(calm, run(tmp_path / "run", sparse, size=2, kills=kills))


def _kill(args: dict[str, Any], step: int, moment: str) -> None:
    inject_fault(args, step, moment)


def test_step_with_two_passes_is_undone(tmp_path: Path) -> None:
    calm = ends(run(tmp_path / "calm", two_passes, size=2))
    kills = [(1, 0, 2, "in pass 0"), (0, 0, 4, "in pass 1")]
    assert_same(calm, run(tmp_path / "run", two_passes, size=2, kills=kills))


@pytest.mark.parametrize("variant", ["fused", "foreach", "amsgrad"])
def test_result_is_identical_with_every_variant_of_adamw(variant: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {variant: True}
    optimizer = partial(ADAMW, **options)
    calm = ends(run(tmp_path / "calm", closure, steps=STEPS, optimizer=optimizer))
    kills = [(1, 0, 3, "in backward")]
    assert_same(calm, run(tmp_path / "run", closure, steps=STEPS, optimizer=optimizer, kills=kills))


def test_optimizer_with_several_updates_per_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 1"):
        run(tmp_path / "run", closure, steps=1, optimizer=torch.optim.LBFGS, run_s=30.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_zero_redundancy_optimizer_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(2, 2)
        spread = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(SettingsError, match="ZeroRedundancyOptimizer cannot be protected"):
            Protected(model, spread, None, {})
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_first_version_of_fsdp_is_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(SettingsError, match=r"FSDP1.*use fully_shard"):
            Protected(nn.Sequential(model), optimizer, None, {})
    finally:
        dist.destroy_process_group()
