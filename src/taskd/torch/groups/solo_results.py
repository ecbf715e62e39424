"""What a collective leaves in its output when nobody else takes part.

Two callers in `group.py`: a replacement process that builds its model before it has met its
peers, and a group that has lost one. Both need plausible values rather than uninitialised memory:
user code may size a buffer or index a list by them before the step is abandoned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]
Alone = Callable[[int, tuple[Any, ...]], Tensors]
"""Given our rank in the group and the call's arguments: fill the outputs and return them."""


def _keep(rank: int, args: tuple[Any, ...]) -> Tensors:
    """In place: what we have is all there is."""
    return flat(args[0])


def _nothing(rank: int, args: tuple[Any, ...]) -> Tensors:
    return []


def _everywhere(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Gather lists: our input takes every place."""
    outputs, inputs = args[0], flat(args[1])
    if not outputs or isinstance(outputs[0], torch.Tensor):
        return _fill(flat(outputs), inputs[0]) if inputs else []
    if len(outputs) == len(inputs):
        for places, own in zip(outputs, inputs, strict=True):
            _fill(places, own)
    else:  # allgather_coalesced: one list of outputs a rank
        for places in outputs:
            for place, own in zip(places, inputs, strict=True):
                _copy(place, own)
    return flat(outputs)


def _tile(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Gather into one tensor: our input, over and over."""
    outputs, inputs = flat(args[0]), flat(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        if own.numel():
            # The input is often a view of the output: copy it before it is written over.
            output.view(-1, own.numel()).copy_(own.reshape(1, -1).clone())
    return outputs


def _share(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Scatter from one tensor: our part of our own input."""
    outputs, inputs = flat(args[0]), flat(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        if output.numel():
            output.view(-1).copy_(own.reshape(-1, output.numel())[rank].clone())
    return outputs


def _share_list(rank: int, args: tuple[Any, ...]) -> Tensors:
    """Scatter from lists: our item of our own input. A receiver of `scatter` has none."""
    outputs = flat(args[0])
    lists = args[1] if args[1] and not isinstance(args[1][0], torch.Tensor) else [args[1]]
    for output, items in zip(outputs, lists, strict=False):
        if items:
            _copy(output, items[rank])
    return outputs


def _exchange(rank: int, args: tuple[Any, ...]) -> Tensors:
    """All-to-all: as if every peer had sent what we send ourselves."""
    outputs, inputs = flat(args[0]), flat(args[1])
    for output, own in zip(outputs, inputs, strict=True):
        _copy(output, own)
    return outputs


def flat(value: Any) -> Tensors:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)]


def _fill(places: Sequence[torch.Tensor], own: torch.Tensor) -> Tensors:
    for place in places:
        _copy(place, own)
    return list(places)


def _copy(place: torch.Tensor, own: torch.Tensor) -> None:
    """As much as fits: peers may have had other sizes."""
    count = min(place.numel(), own.numel())
    if count and place.data_ptr() != own.data_ptr():
        place.view(-1)[:count].copy_(own.reshape(-1)[:count].clone())


ALONE: dict[str, Alone] = {
    "allreduce": _keep,
    "allreduce_coalesced": _keep,
    "broadcast": _keep,
    "reduce": _keep,
    "allgather": _everywhere,
    "allgather_coalesced": _everywhere,
    "gather": _everywhere,
    "all_gather_single": _tile,
    "_allgather_base": _tile,
    "all_gather_single_coalesced": _tile,
    "allgather_into_tensor_coalesced": _tile,
    "reduce_scatter": _share_list,
    "scatter": _share_list,
    "reduce_scatter_single": _share,
    "_reduce_scatter_base": _share,
    "reduce_scatter_single_coalesced": _share,
    "reduce_scatter_tensor_coalesced": _share,
    "alltoall": _exchange,
    "all_to_all_single": _exchange,
    "alltoall_base": _exchange,
    "send": _nothing,
    "recv": _keep,
    "recv_anysource": _keep,
    "barrier": _nothing,
}
"""Every operation of a group, by the name that torch calls."""
