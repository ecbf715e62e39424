"""Makes DDP's buffers the same on all ranks before a step commits, not when the next one begins.

BatchNorm's statistics change in every forward pass, on each rank by its own batch. DDP sends those
of rank 0 to all when the *next* pass begins: in between they exist once, and are lost if rank 0
dies. We send them before the optimizer's update, still inside the step that changed them (and
after its backward pass, which still needs the old ones). Every rank computes with the same numbers
as before, and any rank can give them to any other.

DDP sends one message for each type of number. They are small: what costs is to wait for each. So
we put all into one.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SMALL = 4 << 20
"""Up to so many bytes are sent as one message, from memory that is kept for it."""
ALIGNED = 16

Home = tuple[nn.Module, str]
"""Where a buffer is found: a forward pass may put in a new tensor."""
Kind = tuple[torch.Size, torch.dtype, torch.device]


def homes(model: nn.Module, ignored: Collection[str] = ()) -> list[Home]:
    return [
        (module, name)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and f"{path}.{name}".lstrip(".") not in ignored
    ]


def found(where: list[Home]) -> list[torch.Tensor]:
    """As they are now."""
    there = (module._buffers[name] for module, name in where)
    return [buffer for buffer in there if buffer is not None]


def take_over(model: DistributedDataParallel) -> Exchange | None:
    """Take the exchange over from DDP. None when there is none to make."""
    if not model.broadcast_buffers or not model.modules_buffers or hasattr(model, "buffer_hook"):
        return None
    if hasattr(model, "forward_sync_buffers"):
        model.forward_sync_buffers = False
    else:
        model.broadcast_buffers = False
    return Exchange(model)


class Exchange:
    """The buffers of one model, from rank 0 to all."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._homes = homes(model.module, model.parameters_to_ignore)
        self._kinds: list[Kind] = []
        self._letters: list[_Letter] = []

    @torch.no_grad()
    def make(self) -> None:
        """Not in the middle of an accumulation, where DDP does not either."""
        if not self._model.require_forward_param_sync:
            return
        buffers = found(self._homes)
        kinds = [(one.shape, one.dtype, one.device) for one in buffers]
        if kinds != self._kinds:
            self._kinds, self._letters = kinds, _letters(kinds)
        if not self._letters:
            self._model._default_broadcast_coalesced(buffers)
        for letter in self._letters:
            letter.send(buffers, self._model.process_group)


class _Letter:
    """One message with all buffers of one device in it."""

    def __init__(self, places: list[int], kinds: list[Kind]) -> None:
        self._places = places
        those = [kinds[place] for place in places]
        ends = list(accumulate(map(_aligned, those), initial=0))
        self._whole = torch.empty(ends[-1], dtype=torch.uint8, device=those[0][2])
        self._parts = [
            self._whole[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for at, (shape, dtype, _) in zip(ends, those, strict=False)
        ]
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, buffers: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        mine = [buffers[place] for place in self._places]
        torch._foreach_copy_(self._parts, mine)
        group.broadcast([self._whole], self._options).wait()
        if group.rank():
            torch._foreach_copy_(mine, self._parts)


def _letters(kinds: list[Kind]) -> list[_Letter]:
    """None when they are large: then keeping memory for them would cost more than it saves."""
    if sum(map(_aligned, kinds)) > SMALL:
        return []
    places: dict[torch.device, list[int]] = {}
    for place, (_, _, device) in enumerate(kinds):
        places.setdefault(device, []).append(place)
    return [_Letter(those, kinds) for those in places.values()]


def _aligned(kind: Kind) -> int:
    shape, dtype, _ = kind
    return -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED
