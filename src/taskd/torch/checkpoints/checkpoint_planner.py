"""What a survivor writes into the emergency checkpoint when it is not exactly its own part.

`torch.distributed.checkpoint` asks each rank for a plan of what it writes, and refuses all of them
if a tensor stays incomplete. This planner adds what was read from the copies of lost ranks
(`orphaned_shards.py`), at the place that it had in the whole tensor.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pickle import UnpicklingError

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from taskd.torch import compat
from taskd.torch.state.orphaned_shards import CheckpointFailed, Orphan, coordinate
from taskd.torch.state.pieces import Key, optimized
from taskd.torch.state.protected import Protected

Path = tuple[str | int, ...]
"""The path of a value in the content of a checkpoint (`emergency_checkpoint.content_of`)."""


class SurvivorPlanner(DefaultSavePlanner):
    """Plans our own part, if our state is that of the step, and the orphans that we have read."""

    def __init__(self, protected: Protected, has_step: bool, orphans: list[Orphan]) -> None:
        super().__init__()
        self._has_step, self._orphans = has_step, orphans
        self._keys = dict(keys_by_path(protected))
        self._read: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = list(plan.items) if self._has_step else []
        planned = {item.index for item in items}
        for orphan in self._orphans:
            for name, whole in self.state_dict.items():
                if isinstance(whole, DTensor) and coordinate(whole.device_mesh, orphan.rank):
                    item, tensor = self._item(name, whole, orphan)
                    if tensor.numel() and item.index not in planned:
                        planned.add(item.index)
                        items.append(item)
                        self._read[item.index] = tensor
        self.plan = replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        tensor = self._read.get(write_item.index)
        return super().resolve_data(write_item) if tensor is None else tensor

    def _item(self, name: str, whole: DTensor, orphan: Orphan) -> tuple[WriteItem, torch.Tensor]:
        own = coordinate(whole.device_mesh, orphan.rank)
        assert own is not None
        shape, offsets = compat.shard_place(whole, own)
        key = self._keys.get(self.mappings[name])
        tensor = orphan.tensors.get(key) if key is not None else None
        if tensor is None or list(tensor.shape) != shape:
            found = "nothing" if tensor is None else f"the shape {tuple(tensor.shape)}"
            raise CheckpointFailed(
                f"the copy of rank {orphan.rank} has {found} for {name}, expected {tuple(shape)}"
            )
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape)),
            TensorProperties.create_from_tensor(tensor),
            whole.size(),
        )
        index = MetadataIndex(name, torch.Size(offsets))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data), tensor


OPTIMIZER_STATE = "optimizers.0.state."


class WeightsPlanner(DefaultLoadPlanner):
    """Loads what cannot run code. Other values of an optimizer are in a file of ours, sealed.

    An optimizer has no state of a parameter that has never had a gradient, so that may be missing.
    """

    def __init__(self) -> None:
        super().__init__(allow_partial_load=True)

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        missing = set(self.state_dict) - set(self.metadata.state_dict_metadata)
        if lost := sorted(name for name in missing if not name.startswith(OPTIMIZER_STATE)):
            raise RuntimeError(f"it has no {', '.join(lost[:3])}")
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, weights_only=True)
        except UnpicklingError:
            return
        plain = io.BytesIO()
        torch.save(loaded, plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def keys_by_path(protected: Protected) -> Iterator[tuple[Path, Key]]:
    """For each path in a checkpoint, the key under which a copy has the same tensor."""
    known: dict[int, Key] = {
        id(one): ("parameter", at, "") for at, one in enumerate(protected.parameters)
    }
    known |= {id(one): ("buffer", at, "") for at, one in enumerate(protected.buffers())}
    names: dict[int, set[str]] = {}
    for number, model in enumerate(protected.models):
        parameters = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        for name, tensor in chain[tuple[str, torch.Tensor]](parameters, buffers):
            for fqn in compat.checkpoint_names(model, name) if id(tensor) in known else ():
                yield ("models", number, fqn), known[id(tensor)]
                names.setdefault(id(tensor), set()).add(fqn)
    for at, (optimizer, parameter) in enumerate(optimized(protected)):
        for fqn in names.get(id(parameter), ()):
            for name in optimizer.state.get(parameter, {}):
                yield ("optimizers", 0, "state", fqn, name), ("optimizer", at, name)
