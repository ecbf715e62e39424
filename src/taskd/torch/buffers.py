"""Makes DDP's buffers the same on all ranks at the end of a step, not at the start of the next.

BatchNorm's statistics change in every forward pass, on each rank by its own batch. DDP sends those
of rank 0 to all when the *next* pass begins: in between they exist once, and are lost if rank 0
dies. We send them when the pass that changed them ends, still inside the step. Every rank computes
with the same numbers as before, and any rank can give them to any other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def share(model: DistributedDataParallel) -> None:
    """Take the exchange over from DDP, if it has one to make."""
    if not model.broadcast_buffers or not model.modules_buffers or hasattr(model, "buffer_hook"):
        return
    if hasattr(model, "forward_sync_buffers"):
        model.forward_sync_buffers = False
    else:
        model.broadcast_buffers = False
    model.register_forward_hook(_after_forward)


def _after_forward(model: Any, *_: Any) -> None:
    # Not in the middle of an accumulation, where DDP does not either.
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        model._default_broadcast_coalesced()
