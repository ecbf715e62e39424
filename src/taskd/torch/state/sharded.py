"""What is special about sharded models: which rank holds which shard, and where replicas are.

`job.py` tells the manager which shard this rank holds, so that a lost rank gets its state from a
rank that holds the same. The modules of distributed tensors are slow to import; nothing here
imports them, since a model that needs them has already done so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from taskd.torch import compat
from taskd.torch.state.protected import Protected


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the tensor that this rank holds."""
    tensor = tensor.detach()
    return compat.local_tensor(tensor) if is_distributed(tensor) else tensor


def describe(protected: Protected) -> tuple[str, int]:
    """The name of this rank's shard, and the number of the replica that it belongs to.

    Two ranks hold the same shard when every parameter is distributed the same way and they have the
    same coordinates along the mesh dimensions that shard it. Without sharding, as under DDP, the
    name is empty. A model that is divided in another way has a `shard_name` of its own.
    """
    for model in protected.models:
        if name := getattr(model, "shard_name", ""):
            return str(name), -1
    cuts: list[Any] = []
    replicas: set[tuple[int, ...]] = set()
    for index, parameter in enumerate(protected.parameters):
        if is_distributed(parameter):
            cut, replica = _coordinates(parameter)
            cuts.append((index, tuple(local(parameter).shape), cut))
            replicas.add(replica)
    if not any(cut for _, _, cut in cuts):
        return "", -1
    places = {cut for _, _, cut in cuts if cut}
    readable = "-".join(f"{at}of{size}" for at, size in max(places, key=len))
    shard = f"{readable}.{blake2b(repr(cuts).encode(), digest_size=4).hexdigest()}"
    return shard, _number(max(replicas, key=len))


def has_replicas(protected: Protected) -> bool:
    """Whether every shard is on more than one rank."""
    distributed: list[Any] = [one for one in protected.parameters if is_distributed(one)]
    return all(
        any(
            placement.is_replicate() and size > 1
            for placement, size in zip(one.placements, one.device_mesh.shape, strict=True)
        )
        for one in distributed
    )


def by_replica(protected: Protected, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """These ranks, one replica after the other. The ranks of one replica must run their passes
    together, so they have to get equally many parts of a batch."""
    for parameter in protected.parameters:
        if is_distributed(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            copied = [dim for dim, how in enumerate(placements) if how.is_replicate()]
            if len(copied) < len(placements):
                cut = [dim for dim in range(len(placements)) if dim not in copied]
                order = mesh.mesh.permute(*copied, *cut).flatten().tolist()
                place = {rank: at for at, rank in enumerate(order)}
                return tuple(sorted(ranks, key=lambda rank: place.get(rank, len(place))))
    return ranks


def _coordinates(parameter: Any) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Where this rank is along the mesh dimensions that shard, and along those that replicate."""
    mesh = parameter.device_mesh
    own, sizes = mesh.get_coordinate(), mesh.shape
    cut, replica = list[tuple[int, int]](), list[int]()
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            replica += [own[dim], sizes[dim]]
        else:
            cut.append((own[dim], sizes[dim]))
    return tuple(cut), tuple(replica)


def _number(replica: tuple[int, ...]) -> int:
    """Coordinates along the replicating dimensions, as one number."""
    number = 0
    for at, size in zip(replica[::2], replica[1::2], strict=True):
        number = number * size + at
    return number


def check(protected: Protected, with_checkpoint: bool) -> None:
    """Refuse a torch that could not bring this model back after a lost step, before there is one.

    `with_checkpoint`: also look for what the emergency checkpoint needs, whose modules take 0.2 s
    to import. A replacement leaves that out: its predecessor has looked.
    """
    for model in protected.models:
        compat.check_fsdp(compat.fsdp_states(model))
    if with_checkpoint and any(is_distributed(one) for one in protected.parameters):
        compat.check_sharded()


@contextmanager
def reduce_within_replica(model: Any) -> Iterator[None]:
    """Gradients of the backward passes in here are summed within the replica only."""
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def has_unreduced_gradients(model: nn.Module) -> bool:
    """Whether FSDP2 has gradients that it has not distributed over the ranks yet."""
    return any(map(compat.has_unreduced_gradients, compat.fsdp_states(model)))


def reset(model: nn.Module) -> None:
    """Bring FSDP2 back to where it is between two steps, wherever it was interrupted."""
    for state in compat.fsdp_states(model):
        compat.reset_fsdp(state)
