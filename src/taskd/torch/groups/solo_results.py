"""What a collective leaves in its output when no other rank takes part.

Two callers in `resilient_group.py`: a replacement process that builds its model before it has met
its peers, and a group that has lost one. Both need plausible values rather than uninitialised
memory: a script may size a buffer or index a list by them before the step is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]
SoloEffect = Callable[[int, tuple[Any, ...]], Tensors]
"""Gets the rank in the group and the call's arguments, fills the outputs and returns them."""


def _unchanged(rank: int, args: tuple[Any, ...]) -> Tensors:
    """In place: the output is the own input."""
    return flatten(args[0])


def _no_output(rank: int, args: tuple[Any, ...]) -> Tensors:
    return []


def _repeat_list(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Gather into lists: our input at every place."""
    outputs, inputs = args[0], flatten(args[1])
    if not outputs or isinstance(outputs[0], torch.Tensor):
        return _fill(flatten(outputs), inputs[0]) if inputs else []
    if len(outputs) == len(inputs):
        for places, own in zip(outputs, inputs, strict=True):
            _fill(places, own)
    else:  # allgather_coalesced: one list of outputs per rank
        for places in outputs:
            for place, own in zip(places, inputs, strict=True):
                _copy(place, own)
    return flatten(outputs)


def _repeat(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Gather into one tensor: our input, repeated."""
    outputs, inputs = flatten(args[0]), flatten(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        if own.numel():
            # The input is often a view of the output: copy it before it is overwritten.
            output.view(-1, own.numel()).copy_(own.reshape(1, -1).clone())
    return outputs


def _own_part(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Scatter from one tensor: our part of our own input."""
    outputs, inputs = flatten(args[0]), flatten(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        if output.numel():
            output.view(-1).copy_(own.reshape(-1, output.numel())[rank].clone())
    return outputs


def _own_item(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Scatter from lists: our item of our own input. A receiver of `scatter` has no list."""
    outputs = flatten(args[0])
    lists = args[1] if args[1] and not isinstance(args[1][0], torch.Tensor) else [args[1]]
    for output, items in zip(outputs, lists, strict=False):
        if items:
            _copy(output, items[rank])
    return outputs


def _from_self(rank: int, args: tuple[Any, ...]) -> Tensors:
    """All-to-all: as if every peer had sent what we send to ourselves."""
    outputs, inputs = flatten(args[0]), flatten(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        _copy(output, own)
    return outputs


def flatten(value: Any) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flatten(item)]


def _fill(places: Sequence[torch.Tensor], own: torch.Tensor) -> Tensors:
    for place in places:
        _copy(place, own)
    return list(places)


def _copy(place: torch.Tensor, own: torch.Tensor) -> None:
    """As much as fits: the peers' tensors may have had other sizes."""
    count = min(place.numel(), own.numel())
    if count and place.data_ptr() != own.data_ptr():
        place.view(-1)[:count].copy_(own.reshape(-1)[:count].clone())


SOLO_EFFECTS: dict[str, SoloEffect] = {
    "allreduce": _unchanged,
    "allreduce_coalesced": _unchanged,
    "broadcast": _unchanged,
    "reduce": _unchanged,
    "allgather": _repeat_list,
    "allgather_coalesced": _repeat_list,
    "gather": _repeat_list,
    "all_gather_single": _repeat,
    "_allgather_base": _repeat,
    "all_gather_single_coalesced": _repeat,
    "allgather_into_tensor_coalesced": _repeat,
    "reduce_scatter": _own_item,
    "scatter": _own_item,
    "reduce_scatter_single": _own_part,
    "_reduce_scatter_base": _own_part,
    "reduce_scatter_single_coalesced": _own_part,
    "reduce_scatter_tensor_coalesced": _own_part,
    "alltoall": _from_self,
    "all_to_all_single": _from_self,
    "alltoall_base": _from_self,
    "send": _no_output,
    "recv": _unchanged,
    "recv_anysource": _unchanged,
    "barrier": _no_output,
}
"""Every operation of a process group, by the name under which torch calls it."""
