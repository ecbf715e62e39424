"""Makes DDP's buffers the same on all ranks before a step commits, not when the next one begins.

BatchNorm's statistics change in every forward pass, on each rank by its own batch. DDP sends those
of rank 0 to all when the *next* pass begins: in between they exist once, and are lost if rank 0
dies. We send them before the optimizer's update, still inside the step that changed them (and
after its backward pass, which still needs the old ones). Every rank computes with the same numbers
as before, and any rank can give them to any other.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


def take_over(model: DistributedDataParallel) -> bool:
    """Take the exchange over from DDP. False when there is none to make."""
    if not model.broadcast_buffers or not model.modules_buffers or hasattr(model, "buffer_hook"):
        return False
    if hasattr(model, "forward_sync_buffers"):
        model.forward_sync_buffers = False
    else:
        model.broadcast_buffers = False
    return True


def share(model: Any) -> None:
    """From rank 0 to all; not in the middle of an accumulation, where DDP does not either."""
    if model.require_forward_param_sync:
        model._default_broadcast_coalesced()
