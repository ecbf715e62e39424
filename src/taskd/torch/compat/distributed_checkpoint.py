"""Distributed tensors, and `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn

from taskd.runtime.private_names import (
    Find,
    PrivateName,
    check_torch,
    find_owner,
    private_names,
)
from taskd.torch.compat.process_groups import default_group

_THREAD = "torch.distributed.checkpoint._async_thread_executor:_ThreadBasedAsyncCheckpointExecutor"

SHARDED = (
    *private_names(
        "torch.distributed.tensor:DTensor", "_local_tensor", "copying the shards of a rank"
    ),
    *private_names(
        "torch.distributed.tensor._utils",
        "_compute_local_shape_and_global_offset",
        "writing a lost rank's shard into the emergency checkpoint",
    ),
    *private_names(
        "torch.distributed.checkpoint.state_dict",
        "_get_fqns",
        "writing a lost rank's shard into the emergency checkpoint",
    ),
)
"""Checked when a model with distributed tensors is protected."""

CHECKPOINTS = (
    *private_names(
        "torch.distributed.checkpoint.utils:_DistWrapper",
        "broadcast_object gather_object all_gather_object scatter_object use_dist is_coordinator "
        "coordinator_rank group",
        "torch.distributed.checkpoint in a replacement",
    ),
    *private_names(
        "torch.distributed.checkpoint.state_dict_saver",
        "_save_state_dict",
        "torch.distributed.checkpoint in a replacement",
    ),
    # Older versions have a function instead, and their failed saves end the script.
    *private_names(
        _THREAD, "execute_save _executor", "dcp.async_save during a fault", optional_owner=True
    ),
)
"""Checked when the script imports `torch.distributed.checkpoint`."""


def check_sharded(find: Find = find_owner) -> None:
    """The names that sharded models need."""
    check_torch(SHARDED, find)


def check_checkpoints(find: Find = find_owner) -> None:
    """The names that `torch.distributed.checkpoint` in a protected job needs."""
    check_torch(CHECKPOINTS, find)


def local_tensor(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank holds."""
    local: torch.Tensor = tensor._local_tensor
    return local


def shard_place(whole: Any, coordinate: list[int]) -> tuple[list[int], list[int]]:
    """Shape and offsets of the shard that the rank at this coordinate of the mesh holds."""
    from torch.distributed.tensor import _utils

    shape, offsets = _utils._compute_local_shape_and_global_offset(
        whole.shape, whole.device_mesh.shape, coordinate, whole.placements
    )
    return list(shape), list(offsets)


def checkpoint_names(model: nn.Module, name: str) -> set[str]:
    """The names that `torch.distributed.checkpoint` gives to this parameter or buffer."""
    from torch.distributed.checkpoint import state_dict

    return set(state_dict._get_fqns(model, name))


def wrap_checkpoint_collectives(
    started: Callable[[Any], None],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Wrap what DCP exchanges with other ranks; `started` gets the object of each save or load."""
    from torch.distributed.checkpoint import utils

    owner: Any = utils._DistWrapper
    original = inspect.unwrap(owner.__init__)

    @wraps(original)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        started(self)

    owner.__init__ = initialise
    names = ("broadcast_object", "gather_object", "all_gather_object", "scatter_object", "barrier")
    for name in names:
        if hasattr(owner, name):  # older versions have no `barrier`
            setattr(owner, name, wrap(inspect.unwrap(getattr(owner, name))))


def checkpoint_coordinator(collectives: Any) -> int:
    """The rank in the whole job that plans the checkpoint."""
    # Older versions take the rank in the group for it.
    found = getattr(collectives, "global_coordinator_rank", collectives.coordinator_rank)
    return int(found)


def wrap_checkpoint_save(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what `dcp.save` and `dcp.async_save` do with the state dict."""
    from torch.distributed.checkpoint import state_dict_saver

    original = inspect.unwrap(state_dict_saver._save_state_dict)
    state_dict_saver._save_state_dict = wrap(original)


def wrap_checkpoint_thread(called: Callable[[Any, Any], None]) -> None:
    """Call this with the thread pool of each `dcp.async_save`, in the thread that called it, and
    with the process group that it uses; None: it uses none."""
    owner: Any = find_owner(PrivateName(_THREAD, "execute_save", ""))
    if owner is None:
        return
    original = inspect.unwrap(owner.execute_save)

    @wraps(original)
    def execute_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("process_group") or default_group()
        called(self._executor, None if kwargs.get("no_dist") else group)
        return original(self, *args, **kwargs)

    owner.execute_save = execute_save


def forget_checkpoint_plans() -> None:
    """Drop the plans of earlier saves (`DefaultSavePlanner(enable_plan_caching=True)`)."""
    from torch.distributed.checkpoint.planner import SavePlanner

    for name, value in vars(SavePlanner).items():
        if name.startswith("_cached_") and isinstance(value, dict):
            value.clear()


def no_checkpoint() -> Any:
    """What `dcp.save` returns where nothing was saved."""
    from torch.distributed.checkpoint.metadata import Metadata

    return Metadata(state_dict_metadata={})
