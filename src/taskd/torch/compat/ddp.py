"""DistributedDataParallel: the same buckets, buffers and hooks on every rank."""

from __future__ import annotations

from typing import Any

import torch

from taskd.runtime.private_names import private_names

_DDP = "torch.nn.parallel:DistributedDataParallel"

NAMES = (
    *private_names(
        "torch._C._distributed_c10d:Reducer",
        "_rebuild_buckets prepare_for_backward",
        "the same DDP buckets on every rank",
    ),
    *private_names(
        _DDP,
        "reducer find_unused_parameters static_graph",
        "the same DDP buckets on every rank",
    ),
    *private_names(
        _DDP,
        "_build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper",
        "DDP in a job that has shrunk or grown",
    ),
    *private_names(
        _DDP,
        "_default_broadcast_coalesced modules_buffers parameters_to_ignore "
        "require_forward_param_sync broadcast_buffers",
        "the same DDP buffers on every rank before a step commits",
    ),
    *private_names(_DDP, "_comm_hooks", "the state of communication hooks such as PowerSGD"),
)


def rebuild_buckets(reducer: Any) -> None:
    reducer._rebuild_buckets()


def rebuild_reducer(model: Any) -> None:
    """DDP's reducer keeps the number of ranks that it divides by."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)


def broadcast_coalesced(model: Any, tensors: list[torch.Tensor]) -> None:
    """Send DDP's buffers from rank 0, as DDP does."""
    model._default_broadcast_coalesced(tensors)


def hooks_of(model: Any) -> list[tuple[Any, Any]]:
    """DDP's communication hooks, each with its state."""
    return list(model._comm_hooks)
