"""Makes DDP's buffers the same on all ranks before a step commits, not when the next one begins.

BatchNorm's statistics change in every forward pass, on each rank by its own batch. DDP sends those
of rank 0 to all ranks when the *next* pass begins: in between they exist once, and are lost if rank
0 dies. We send them before the optimizer's update, inside the step that changed them (and after its
backward pass, which still needs the old ones). Every rank computes with the same numbers as
before, and any rank can give them to any other. A pass in training mode after that, as between the
two updates of a GAN, makes it necessary again: before the next update, or at the end of the step.

DDP sends one message per dtype. The messages are small: waiting for each is what costs. So we put
all buffers of a device into one.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taskd.torch import compat

MAX_MESSAGE_BYTES = 4 << 20
"""Buffers up to this size are sent as one message, from memory that is kept for it."""
ALIGNMENT = 16
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Modules that count statistics in training mode, and do not compute with them."""

BufferSlot = tuple[nn.Module, str]
"""Where a buffer is found: a forward pass may put in a new tensor."""
Layout = tuple[torch.Size, torch.dtype, torch.device]


def buffer_slots(model: nn.Module, ignored: Collection[str] = ()) -> list[BufferSlot]:
    return [
        (module, name)
        for path, module in model.named_modules()
        for name, buffer in compat.buffers_of(module).items()
        if buffer is not None and f"{path}.{name}".lstrip(".") not in ignored
    ]


def read_slots(slots: list[BufferSlot]) -> list[torch.Tensor]:
    """The buffers as they are now."""
    buffers = (compat.buffers_of(module)[name] for module, name in slots)
    return [buffer for buffer in buffers if buffer is not None]


def _writable(slots: list[BufferSlot]) -> list[torch.Tensor]:
    """The buffers, to be written between a pass and its backward pass.

    In a GAN, the critic's update comes before the generator's backward pass. In training mode that
    pass has kept the statistics without using them, and autograd refuses if they have changed. It
    does not notice a change through `data`.
    """
    return [
        buffer.data if isinstance(module, NORMS) and module.training else buffer
        for (module, _), buffer in zip(slots, read_slots(slots), strict=True)
    ]


def take_over(model: DistributedDataParallel) -> BufferExchange | None:
    """Take the exchange over from DDP. None: DDP does not exchange buffers."""
    if not model.broadcast_buffers or not model.modules_buffers or hasattr(model, "buffer_hook"):
        return None
    if hasattr(model, "forward_sync_buffers"):
        model.forward_sync_buffers = False
    else:
        model.broadcast_buffers = False
    return BufferExchange(model)


class BufferExchange:
    """Sends the buffers of one model from rank 0 to all ranks."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._slots = buffer_slots(model.module, model.parameters_to_ignore)
        self._layouts: list[Layout] = []
        self._messages: list[_BufferMessage] = []
        self.is_due = False
        """A pass has changed the buffers, perhaps, and they were not sent since."""
        model.register_forward_pre_hook(self._before_pass)

    def _before_pass(self, model: nn.Module, *_: Any) -> None:
        if model.training:
            self.is_due = True

    @torch.no_grad()
    def run(self, is_updated: bool = False) -> None:
        """Does nothing in the middle of gradient accumulation, as DDP."""
        if not (is_updated or self._model.require_forward_param_sync):
            return
        self.is_due = False
        buffers = _writable(self._slots)
        layouts = [(one.shape, one.dtype, one.device) for one in buffers]
        if layouts != self._layouts:
            self._layouts, self._messages = layouts, _messages(layouts)
        if not self._messages:
            compat.broadcast_coalesced(self._model, buffers)
        for message in self._messages:
            message.send(buffers, self._model.process_group)


class _BufferMessage:
    """One message with all buffers of one device in it."""

    def __init__(self, indices: list[int], layouts: list[Layout]) -> None:
        self._indices = indices
        mine = [layouts[index] for index in indices]
        ends = list(accumulate(map(_aligned_bytes, mine), initial=0))
        self._whole = torch.empty(ends[-1], dtype=torch.uint8, device=mine[0][2])
        self._parts = [
            self._whole[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for at, (shape, dtype, _) in zip(ends, mine, strict=False)
        ]
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0

    def send(self, buffers: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        mine = [buffers[index] for index in self._indices]
        compat.copy_all(self._parts, mine)
        group.broadcast([self._whole], self._options).wait()
        if group.rank():
            compat.copy_all(mine, self._parts)


def _messages(layouts: list[Layout]) -> list[_BufferMessage]:
    """Empty when the buffers are large: keeping memory for them would cost more than it saves."""
    if sum(map(_aligned_bytes, layouts)) > MAX_MESSAGE_BYTES:
        return []
    indices: dict[torch.device, list[int]] = {}
    for index, (_, _, device) in enumerate(layouts):
        indices.setdefault(device, []).append(index)
    return [_BufferMessage(those, layouts) for those in indices.values()]


def _aligned_bytes(layout: Layout) -> int:
    shape, dtype, _ = layout
    return -(-shape.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
