"""What a survivor writes into the last checkpoint when it holds more, or less, than its own part.

`torch.distributed.checkpoint` asks each rank for a plan of what it writes, and refuses all of them
if a tensor stays incomplete. This one adds what was read from the copies of lost ranks
(`orphans.py`), at the place that it had in the whole tensor.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import _get_fqns
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from taskd.torch.state import transfer as state
from taskd.torch.state.orphaned_shards import CannotDump, Key, Orphan, coordinate
from taskd.torch.state.protected import Protected

Place = tuple[str | int, ...]
"""Where something stands in the content of a checkpoint (`dump._content`)."""


class Planner(DefaultSavePlanner):
    """Plans our own part, if our state is that of the step, and what we have read of lost ones."""

    def __init__(self, kept: Protected, stands: bool, orphans: list[Orphan]) -> None:
        super().__init__()
        self._stands, self._orphans = stands, orphans
        self._keys = dict(_keys(kept))
        self._read: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = list(plan.items) if self._stands else []
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
        mesh = whole.device_mesh
        sizes, offsets = _compute_local_shape_and_global_offset(
            whole.shape, mesh.shape, coordinate(mesh, orphan.rank), whole.placements
        )
        key = self._keys.get(self.mappings[name])
        tensor = orphan.tensors.get(key) if key is not None else None
        if tensor is None or tuple(tensor.shape) != tuple(sizes):
            has = "nothing" if tensor is None else f"the shape {tuple(tensor.shape)}"
            raise CannotDump(f"the copy of rank {orphan.rank} has {has} for {name}, not {sizes}")
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
            TensorProperties.create_from_tensor(tensor),
            whole.size(),
        )
        index = MetadataIndex(name, torch.Size(offsets))
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data), tensor


def _keys(kept: Protected) -> Iterator[tuple[Place, Key]]:
    """Under which key a copy has what stands at this place of a checkpoint."""
    known: dict[int, Key] = {
        id(one): ("parameter", at, "") for at, one in enumerate(kept.parameters)
    }
    known |= {id(one): ("buffer", at, "") for at, one in enumerate(kept.buffers())}
    names: dict[int, set[str]] = {}
    for number, model in enumerate(kept.models):
        parameters = model.named_parameters(remove_duplicate=False)
        buffers = model.named_buffers(remove_duplicate=False)
        for name, tensor in chain[tuple[str, torch.Tensor]](parameters, buffers):
            for fqn in _get_fqns(model, name) if id(tensor) in known else ():
                yield ("models", number, fqn), known[id(tensor)]
                names.setdefault(id(tensor), set()).add(fqn)
    for at, (optimizer, parameter) in enumerate(state._optimized(kept)):
        for fqn in names.get(id(parameter), ()):
            for name in optimizer.state.get(parameter, {}):
                yield ("optimizers", 0, "state", fqn, name), ("optimizer", at, name)
