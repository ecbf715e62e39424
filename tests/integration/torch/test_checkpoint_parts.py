"""Parts of a continuous checkpoint that several ranks write, on one node or on several.

Each rank is a short process with groups that exchange nothing: only what it writes is looked at.
"""

from __future__ import annotations

import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from taskd.core.worker.state_classes import Agreement
from taskd.model.ids import Rank
from taskd.runtime.files import checkpoint_folders
from taskd.torch.checkpoints.checkpoint_copies import CheckpointCopies, order_file
from taskd.torch.checkpoints.checkpoint_writer import CheckpointWriter
from taskd.torch.state import sharded
from taskd.torch.state.protected import Protected

DEADLINE_S = 60.0
MODEL = "0123456789abcdef"


def leave_copies(rank: int, shape: tuple[int, ...], shared: Path, directory: Path) -> None:
    """Be that rank for one step, and keep its tensors."""
    size = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    protected = Protected(model, optimizer, None, {})
    own, _ = sharded.describe(protected)
    # The ranks of a job tell each other the names of their shards.
    names_of_all = {Rank(one): f"shard {one % shape[-1]}" for one in range(size)}
    assert own.startswith(f"{rank % shape[-1]}of{shape[-1]}")
    protected.agreement = Agreement(names_of_all, model=MODEL, run="abcd")
    copies = CheckpointCopies(shared, directory, rank, every=4)
    copies.attach(protected)
    copies.agreed(4)
    copies.begin_turn(4, 0, tuple(range(size)), votes=True)
    copies.wait()
    held = {name: sharded.local(one).clone() for name, one in model.named_parameters()}
    torch.save(held, directory.parent / f"held-{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "nodes"), [((3,), 1), ((2, 2), 2)], ids=["one node", "two nodes, replicated"]
)
def test_shards_of_all_ranks_become_one_checkpoint(
    tmp_path: Path, shape: tuple[int, ...], nodes: int
) -> None:
    size, directory = torch.Size(shape).numel(), tmp_path / "out"
    shared = [tmp_path / f"node{number}" for number in range(nodes)]
    for one in shared:
        one.mkdir(mode=0o700)
    folders = [shared[rank % nodes] for rank in range(size)]
    ranks = get_context("forkserver")
    ranks.set_forkserver_preload([__name__])
    for rank in range(size):
        process = ranks.Process(target=leave_copies, args=(rank, shape, folders[rank], directory))
        process.start()
        process.join(DEADLINE_S)
        assert process.exitcode == 0
    written = [order_file(folders[rank], rank).exists() for rank in range(size)]
    assert sum(written) == shape[-1], "replicas write nothing twice"
    for one in shared:
        assert not list(directory.glob("*/taskd.json")), "it is not complete before the last part"
        CheckpointWriter(one, directory).write_all()
    complete = [one for one in checkpoint_folders.folders(directory, MODEL) if one.is_complete]
    assert [one.step for one in complete] == [4]
    state = {"models": [{"0.weight": torch.zeros(7, 6), "1.weight": torch.zeros(5, 7)}]}
    with warnings.catch_warnings(action="ignore"):
        state_dict_loader.load(state, checkpoint_id=complete[0].path, no_dist=True)
    held = [torch.load(tmp_path / f"held-{rank}") for rank in range(shape[-1])]
    for name, whole in state["models"][0].items():
        assert torch.equal(whole, torch.cat([one[name] for one in held]))


def test_checkpoint_with_a_missing_shard_is_not_complete(tmp_path: Path) -> None:
    shared, directory = tmp_path / "node", tmp_path / "out"
    shared.mkdir(mode=0o700)
    ranks = get_context("forkserver")
    for rank in range(2):
        process = ranks.Process(target=leave_copies, args=(rank, (3,), shared, directory))
        process.start()
        process.join(DEADLINE_S)
    writer = CheckpointWriter(shared, directory)
    writer.write_all()
    assert not list(directory.glob("*/taskd.json"))
