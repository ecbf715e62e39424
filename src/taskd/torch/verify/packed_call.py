"""The inputs of a forward and backward pass, as bytes that another rank can repeat it with.

Tensors travel as their values, not as their storage: a batch is often a view of a large dataset.
They come to the receiver's own device. Anything that belongs to a graph or to the protected state
is refused: the receiver would compute with a copy of it, and get no gradients.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from taskd.torch import random_state
from taskd.torch.random_state import Generators
from taskd.torch.state.pieces import raw_bytes
from taskd.torch.state.sealed import sign, unseal

PLACE = "batch of a rank"
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class NotData(Exception):
    """An argument cannot be sent to another rank."""


@dataclass(frozen=True, slots=True)
class PackedCall:
    """The arguments of one call, and the random numbers that it draws."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: Generators
    buffers: list[torch.Tensor] | None
    """Those of the models, where they differ between ranks."""


def pack(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], buffers: list[torch.Tensor] | None = None
) -> bytes:
    """With the state of the random generators at this moment, and the job's seal."""
    stream = io.BytesIO()
    call = PackedCall(args, dict(kwargs), random_state.read(), buffers)
    try:
        _Packer(stream).dump(call)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise NotData(f"an argument cannot be pickled: {error}") from error
    body = stream.getvalue()
    return sign(body, PLACE) + body


def unpack(data: bytes) -> PackedCall:
    call: PackedCall = unseal(data, PLACE)
    return call


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module | torch.optim.Optimizer | nn.Parameter):
            raise NotData(
                f"an argument contains a {type(value).__name__}: pass data only, and let the "
                "function find the model by itself"
            )
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if value.requires_grad:
            raise NotData(
                "an argument requires grad: compute it in the function, so that another rank can"
            )
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        form = FORMATS.get(value.dim(), torch.contiguous_format)
        if value.is_contiguous() or not value.is_contiguous(memory_format=form):
            form = torch.contiguous_format
        data = raw_bytes(value.cpu()).numpy().tobytes()
        return _rebuild, (value.device.type, value.dtype, tuple(value.shape), form, data)


def _rebuild(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], form: torch.memory_format, data: bytes
) -> torch.Tensor:
    value = torch.empty(shape, dtype=dtype)
    if data:
        raw_bytes(value).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return value.to(device).contiguous(memory_format=form)
