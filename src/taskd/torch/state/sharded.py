"""What is special about sharded models: who holds which part, and how FSDP2 forgets a lost step.

`job.py` tells the manager which shard this rank holds, so that a lost rank gets its state from one
that holds the same. The modules of distributed tensors are slow to import; nothing here imports
them, since a model that needs them has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from taskd.core.manager.copy_placement import survives_node_loss
from taskd.torch.compat import UnknownTorch
from taskd.torch.state import fsdp_reset as fsdp
from taskd.torch.state.protected import Protected


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is the local part of a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    tensor = tensor.detach()
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def describe(kept: Protected) -> tuple[str, int]:
    """The shard that this rank holds, and the complete copy of the state that it belongs to.

    Two ranks hold the same shard when every parameter lies the same way and they stand at the same
    place along the dimensions that cut it. Nothing is cut: the shard is empty, as under DDP.
    """
    cuts: list[Any] = []
    copies: set[tuple[int, ...]] = set()
    for index, parameter in enumerate(kept.parameters):
        if is_distributed(parameter):
            cut, copy = _place(parameter)
            cuts.append((index, tuple(local(parameter).shape), cut))
            copies.add(copy)
    if not any(cut for _, _, cut in cuts):
        return "", -1
    places = {cut for _, _, cut in cuts if cut}
    readable = "-".join(f"{at}of{size}" for at, size in max(places, key=len))
    shard = f"{readable}.{blake2b(repr(cuts).encode(), digest_size=4).hexdigest()}"
    return shard, _number(max(copies, key=len))


def has_replicas(kept: Protected) -> bool:
    """Whether every shard lives on more than one rank."""
    distributed: list[Any] = [one for one in kept.parameters if is_distributed(one)]
    return all(
        any(
            placement.is_replicate() and size > 1
            for placement, size in zip(one.placements, one.device_mesh.shape, strict=True)
        )
        for one in distributed
    )


def outlives_a_node(kept: Protected, size: int, per_node: int) -> bool:
    """Whether each shard has a replica on another node, or at all where there is one node only."""
    return all(survives_node_loss(ranks, size, per_node) for ranks in _holders(kept))


def _holders(kept: Protected) -> Iterator[list[int]]:
    """For each parameter that is cut: the ranks that hold the same part of it as this one."""
    for parameter in kept.parameters:
        if is_distributed(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            here = zip(mesh.get_coordinate(), placements, strict=True)
            where = tuple(slice(None) if how.is_replicate() else at for at, how in here)
            yield mesh.mesh[where].flatten().tolist()


def by_replica(kept: Protected, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """These ranks, one replica after the other. Those that share one must go through their passes
    together, so they have to be dealt equally many parts of a batch."""
    for parameter in kept.parameters:
        if is_distributed(parameter):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            copied = [dim for dim, how in enumerate(placements) if how.is_replicate()]
            if len(copied) < len(placements):
                cut = [dim for dim in range(len(placements)) if dim not in copied]
                order = mesh.mesh.permute(*copied, *cut).flatten().tolist()
                place = {rank: at for at, rank in enumerate(order)}
                return tuple(sorted(ranks, key=lambda rank: place.get(rank, len(place))))
    return ranks


def _place(parameter: Any) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Where this rank stands along the dimensions that cut, and along those that copy."""
    mesh = parameter.device_mesh
    here, sizes = mesh.get_coordinate(), mesh.shape
    cut, copy = list[tuple[int, int]](), list[int]()
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate():
            copy += [here[dim], sizes[dim]]
        else:
            cut.append((here[dim], sizes[dim]))
    return tuple(cut), tuple(copy)


def _number(copy: tuple[int, ...]) -> int:
    """Coordinates along the copying dimensions, as one number."""
    number = 0
    for at, size in zip(copy[::2], copy[1::2], strict=True):
        number = number * size + at
    return number


def check(kept: Protected) -> None:
    """Refuse what could not be brought back after a lost step, before there is one."""
    for model in kept.models:
        if not all(fsdp.can_reset(state) for state in _states(model)):
            raise UnknownTorch(
                f"fully_shard of torch {torch.__version__} cannot forget a lost step: "
                "protect sharded models with torch 2.11 or newer, or leave protect() out "
                "and let a fault restart the ranks from your own checkpoint"
            )


@contextmanager
def unsummed(model: Any) -> Iterator[None]:
    """Backward passes in here are summed within the replica only, the next one with all."""
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def forget(model: nn.Module) -> None:
    """Bring FSDP2 back to where it stands between two steps, wherever it was left."""
    for state in _states(model):
        _forget(state)


def _states(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each module that it has sharded."""
    loaded = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    if loaded is None:
        return []
    return [one._get_fsdp_state() for one in model.modules() if isinstance(one, loaded.FSDPModule)]


def _forget(state: Any) -> None:
    if state._is_root:  # known since its first pass; before that there is nothing to forget
        fsdp.reset(state)
    for group in fsdp.groups(state):
        for one in group.fsdp_params:
            one.unsharded_accumulated_grad = None
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None
