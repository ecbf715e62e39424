"""How the tensors of a snapshot become a checkpoint of `torch.distributed.checkpoint`.

A snapshot knows its tensors by their order; a checkpoint knows them by name, with their place in
the whole tensor. The training process describes this once, and the process that writes the
checkpoint (`checkpoint_writer.py`) needs no model.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from taskd.torch.checkpoints import emergency_checkpoint
from taskd.torch.checkpoints.checkpoint_planner import Path, keys_by_path
from taskd.torch.state import pieces
from taskd.torch.state.pieces import Key
from taskd.torch.state.protected import OPTIONS, Protected
from taskd.torch.state.sharded import local

GROUPS: Path = ("optimizers", 0, "param_groups")


@dataclass(frozen=True, slots=True)
class Layout:
    """What one rank writes."""

    plan: SavePlan
    keys: dict[str, Key]
    """For each name, the tensor of the snapshot."""
    paths: dict[str, Path]
    """For each name, its path in the content of the checkpoint."""
    values: dict[str, Any]
    """What is not in the snapshot, by name."""
    groups: list[dict[str, Any]]
    """The options of all optimizers. Those that change are taken from the snapshot."""
    objects: list[dict[str, Any]]
    """For each model, what is in its state dict and is not a tensor."""

    @property
    def is_stable(self) -> bool:
        """The next snapshot with the same tensors has the same layout."""
        return not any(self.objects) and not any(
            isinstance(value, torch.Tensor) for value in self.values.values()
        )

    def only_shards(self) -> Layout:
        """Without what every rank holds."""
        sharded = [item for item in self.plan.items if item.type == WriteItemType.SHARD]
        return replace(self, plan=replace(self.plan, items=sharded), values={})


def describe(protected: Protected) -> Layout:
    """The layout of this rank's state. Takes about as long as `state_dict()`."""
    with _without_updates(protected):
        content, objects = emergency_checkpoint.content_of(protected)
    planner = DefaultSavePlanner()
    planner.set_up_planner(content, is_coordinator=True)
    plan = planner.create_local_plan()
    known, keys, values = dict(keys_by_path(protected)), dict[str, Key](), dict[str, Any]()
    for item in plan.items:
        name = item.index.fqn
        path = planner.mappings[name]
        if path in known:
            keys[name] = known[path]
        elif path[: len(GROUPS)] != GROUPS:
            value = planner.state_dict[name]
            values[name] = local(value).clone() if isinstance(value, DTensor) else deepcopy(value)
    groups = deepcopy(content["optimizers"][0].get("param_groups", []))
    return Layout(plan, keys, dict(planner.mappings), values, groups, objects)


@contextmanager
def _without_updates(protected: Protected) -> Iterator[None]:
    """To look at an optimizer without state (plain SGD), torch makes an update with a learning rate
    of 0, unless it finds a gradient."""
    lent = []
    for optimizer in protected.optimizers:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        if not optimizer.state and parameters and all(one.grad is None for one in parameters):
            lent.append(parameters[0])
            parameters[0].grad = torch.zeros_like(parameters[0])
    try:
        yield
    finally:
        for parameter in lent:
            parameter.grad = None


def signature(protected: Protected) -> tuple[Key, ...]:
    """It changes when a layout is out of date."""
    return tuple(key for key, _ in pieces.tensors(protected))


@dataclass
class CopiedState(DefaultSavePlanner):
    """Gives DCP's writer what it asks for, from a snapshot."""

    layout: Layout
    tensors: dict[Key, torch.Tensor]
    parts: dict[str, Any]
    """The objects of the script, and the options of the optimizers."""
    _groups: list[dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        super().__init__()
        options = self.parts.get(OPTIONS, [])  # the last of each optimizer belongs to no group
        changed = [group for *groups, _ in options for group in groups]
        groups = zip(self.layout.groups, changed, strict=True) if changed else ()
        self._groups = [
            {**group, **{name: now[name] for name in group if name in now}} for group, now in groups
        ]

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._value(write_item.index.fqn)
        if write_item.type == WriteItemType.BYTE_IO or not isinstance(value, torch.Tensor):
            stream = io.BytesIO()
            torch.save(value, stream)
            return stream
        return value.detach()

    def _value(self, name: str) -> Any:
        if name in self.layout.keys:
            return self.tensors[self.layout.keys[name]]
        if name in self.layout.values:
            return self.layout.values[name]
        value: Any = self._groups
        for place in self.layout.paths[name][len(GROUPS) :]:
            value = value[place]
        return value
