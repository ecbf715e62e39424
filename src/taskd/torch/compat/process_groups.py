"""torch's process groups: forming them again, and collectives that do not raise inside a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.runtime.private_names import private_names

_C10D = "torch.distributed.distributed_c10d"
_GROUP = "torch.distributed:ProcessGroup"

NAMES = (
    *private_names(
        _GROUP,
        "_register_backend _set_default_backend _set_group_name _set_group_desc _get_backend",
        "forming process groups again after a fault",
    ),
    *private_names(
        _GROUP,
        "all_gather_single|_allgather_base all_to_all_single|alltoall_base allgather_coalesced "
        "all_gather_single_coalesced|allgather_into_tensor_coalesced "
        "reduce_scatter_single|_reduce_scatter_base "
        "reduce_scatter_single_coalesced|reduce_scatter_tensor_coalesced recv_anysource",
        "collectives that do not raise inside a step",
    ),
    *private_names(_GROUP, "split_group bound_device_id", "dist.split_group in resilient groups"),
    *private_names(
        _GROUP, "_start_coalescing _end_coalescing", "dist.batch_isend_irecv in resilient groups"
    ),
    *private_names(_GROUP, "_get_sequence_number_for_group", "numbering collectives"),
    *private_names(_GROUP, "_allgather_base", "comparing the state of the ranks"),
    *private_names(
        _C10D,
        "_get_default_group _check_p2p_op_list _coalescing_manager",
        "dist.batch_isend_irecv in resilient groups",
    ),
    *private_names(_C10D, "_new_process_group_helper", "groups with a backend of their own"),
    *private_names(_C10D, "_get_object_coll_device", "exchanging sealed objects between ranks"),
    *private_names(_C10D, "_world", "process groups of a job that has shrunk"),
    *private_names(f"{_C10D}:_World", "pg_group_ranks", "process groups of a job that has shrunk"),
    *private_names(
        f"{_C10D}:_World", "pg_coalesce_state", "leaving a batch of sends after a fault"
    ),
    *private_names("torch.distributed:Work", "_source_rank", "receiving from any source"),
)


def register_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
    group._register_backend(device, kind, backend)


def set_default_backend(group: Any, kind: Any) -> None:
    group._set_default_backend(kind)


def name_group(group: Any, name: str, description: str) -> None:
    group._set_group_name(name)
    group._set_group_desc(description)


def backend_of(group: Any, device: torch.device) -> Any:
    return group._get_backend(device)


def start_coalescing(group: Any, device: torch.device) -> None:
    group._start_coalescing(device)


def end_coalescing(group: Any, device: torch.device) -> dist.Work | None:
    work: dist.Work | None = group._end_coalescing(device)
    return work


def all_gather_into(
    group: dist.ProcessGroup, received: torch.Tensor, mine: torch.Tensor
) -> dist.Work:
    """As `dist.all_gather_into_tensor`, whose checks take longer than the exchange of few bytes."""
    work: dist.Work = group._allgather_base(received, mine)
    return work


def forget_coalescing(group: dist.ProcessGroup) -> None:
    """torch keeps the operations of a batch that an exception has left."""
    c10d._world.pg_coalesce_state.pop(group, None)


def set_group_ranks(group: dist.ProcessGroup, ranks: dict[int, int]) -> None:
    """The rank in the job, and the rank in the group, of each member."""
    c10d._world.pg_group_ranks[group] = ranks


def default_group() -> Any:
    return c10d._get_default_group()


def group_helper() -> Callable[..., Any]:
    """The function through which torch creates every group but those that are split off."""
    return c10d._new_process_group_helper


def set_group_helper(helper: Callable[..., Any]) -> None:
    c10d._new_process_group_helper = helper


def device_for_objects(group: Any) -> torch.device:
    """Where torch's own object collectives would put their bytes."""
    return torch.device(c10d._get_object_coll_device(group))


def check_p2p_ops(operations: Any) -> None:
    c10d._check_p2p_op_list(operations)


def coalescing_manager(group: Any, device: torch.device) -> Any:
    return c10d._coalescing_manager(group, device, async_ops=True)


def sequence_number(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def source_rank(work: Any) -> int:
    return int(work._source_rank())
