"""How FSDP2 forgets a step that was lost in the middle, in different versions of torch.

From 2.13 on it can do so by itself (`_reset_iter_state`). For older ones it is done here.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

WHOLE = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
"""What it keeps about an iteration of the whole model, as far as it is there before the first."""
PENDING = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)
"""In each group: what was begun and not taken."""
GROUP = (*PENDING, "_post_forward_indices", "_training_state", "_to_sharded")


def can_reset(state: Any) -> bool:
    """Whether `reset` finds everything where it looks."""
    if hasattr(state, "_reset_iter_state"):
        return True
    if not all(hasattr(state, name) for name in ("_state_ctx", "_comm_ctx", "_fsdp_param_group")):
        return False
    those = [(state._state_ctx, WHOLE), *((group, GROUP) for group in groups(state))]
    return all(hasattr(owner, name) for owner, names in those for name in names)


def groups(state: Any) -> list[Any]:
    """The parameters that are gathered together; torch had one such group a module, now several."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def reset(root: Any) -> None:
    """As if the iteration had not begun. Its results are nobody's any more."""
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    idle = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"].TrainingState.IDLE
    shared = root._comm_ctx
    shared.all_gather_state = shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in groups(state):
            for name in PENDING:
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
