"""FSDP2 (`fully_shard`): forgetting a step that was abandoned.

From torch 2.13 on FSDP2 can do that by itself (`_reset_iter_state`). For older versions it is done
here, from outside, and `check_fsdp` looks for what that needs in the model's own objects.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from taskd.errors import UnknownTorch
from taskd.runtime.private_names import check_torch, private_names

_FSDP = "torch.distributed.fsdp._fully_shard"
NAMES = (
    *private_names(
        f"{_FSDP}._fully_shard:FSDPModule", "_get_fsdp_state", "resetting FSDP2 after a lost step"
    ),
    *private_names(
        f"{_FSDP}._fsdp_state:FSDPState", "_is_root", "resetting FSDP2 after a lost step"
    ),
    *private_names(
        f"{_FSDP}._fsdp_param_group:FSDPParamGroup",
        "fsdp_params",
        "finding the gradients of whole parameters",
    ),
    *private_names(
        f"{_FSDP}._fsdp_param:FSDPParam",
        "unsharded_accumulated_grad _unsharded_param",
        "finding the gradients of whole parameters",
    ),
)
"""Checked when a model with FSDP2 is protected."""

_STATE = ("_state_ctx", "_comm_ctx", "_fsdp_param_group", "_modules_to_run_forward")
"""What FSDP2 keeps for each module."""
_ITERATION = ("all_states", "iter_forward_root", "post_backward_final_callback_queued")
"""What FSDP2 keeps about an iteration of the whole model and has before the first one."""
_PENDING = (
    "_all_gather_result",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_reduce_event",
    "_reshard_after_forward_event",
)
"""What it keeps in each parameter group: results that were started and not used."""
_ACCUMULATED = "unsharded_accumulated_grad"
"""From torch 2.15 on a property: the gradient of the unsharded parameter."""
_PARAMETER_GROUP = (*_PENDING, "_post_forward_indices", "_training_state", "_to_sharded")


def fsdp_states(model: nn.Module) -> list[Any]:
    """What FSDP2 keeps for each module that it has sharded."""
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is None or not hasattr(loaded, "FSDPModule"):
        return []
    return [one._get_fsdp_state() for one in model.modules() if isinstance(one, loaded.FSDPModule)]


def check_fsdp(states: Iterable[Any]) -> None:
    """Refuse an FSDP2 that could not be brought back after a lost step."""
    states = list(states)
    if states:
        check_torch(NAMES)
    if not all(_can_reset(state) for state in states):
        raise UnknownTorch(
            f"torch {torch.__version__} lacks FSDPState._reset_iter_state and the attributes that "
            "TaskD needs to reset fully_shard after a lost step. Install a newer torch, or leave "
            "out protect() and let a fault restart the ranks from your own checkpoint"
        )


def reset_fsdp(state: Any) -> None:
    """Bring FSDP2 back to where it is between two steps, wherever it was interrupted."""
    if state._is_root:  # known since its first pass; before that there is nothing to forget
        _reset(state)
    for group in _parameter_groups(state):
        for one in group.fsdp_params:
            if not isinstance(getattr(type(one), _ACCUMULATED, None), property):
                setattr(one, _ACCUMULATED, None)
            if hasattr(one, "_unsharded_param"):
                one._unsharded_param.grad = None


def has_unreduced_gradients(state: Any) -> bool:
    """Whether FSDP2 keeps gradients of the whole parameters, which are not in the shards."""
    return any(
        getattr(one, _ACCUMULATED, None) is not None
        or getattr(getattr(one, "_unsharded_param", None), "grad", None) is not None
        for group in _parameter_groups(state)
        for one in group.fsdp_params
    )


def _can_reset(state: Any) -> bool:
    if hasattr(state, "_reset_iter_state"):
        return True
    if not all(hasattr(state, name) for name in _STATE):
        return False
    owners = [
        (state._state_ctx, _ITERATION),
        *((group, _PARAMETER_GROUP) for group in _parameter_groups(state)),
    ]
    return all(hasattr(owner, name) for owner, names in owners for name in names)


def _parameter_groups(state: Any) -> list[Any]:
    """The parameters that are gathered together: one group per module in older versions."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reset(root: Any) -> None:
    """As if the iteration had not begun. Its results are not used any more."""
    if hasattr(root, "_reset_iter_state"):
        root._reset_iter_state()
        return
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    idle = sys.modules[f"{_FSDP}._fsdp_common"].TrainingState.IDLE
    shared = root._comm_ctx
    shared.all_gather_state = shared.reduce_scatter_state = None
    shared.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in _parameter_groups(state):
            for name in _PENDING:
                setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
