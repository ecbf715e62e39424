"""What moves the bytes of a process group: gloo, NCCL and the backends of plugins."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.runtime.private_names import private_names
from taskd.runtime.torch_versions import minor

_C10D = "torch.distributed.distributed_c10d"
_GLOO = "torch.distributed:ProcessGroupGloo"
_NCCL = "torch.distributed:ProcessGroupNCCL"
_NUMBERED_FROM_ZERO = (2, 14)
"""From this version on a backend numbers its collectives by itself, and asking for it warns."""

NAMES = (
    *private_names(
        f"{_C10D}:Backend", "register_backend _plugins", "registering the backend taskd"
    ),
    *private_names(
        f"{_C10D}:Backend",
        "backend_type_map backend_capability",
        "choosing a backend for each device",
    ),
    *private_names(
        _C10D,
        "_FR_SELF_RECORDING_BACKENDS",
        "keeping torch's flight recorder off the groups of the backend taskd",
        since=(2, 15),
    ),
    *private_names(
        _C10D, "_DistributedBackendOptions", "creating groups of plugin backends such as HCCL"
    ),
    *private_names(_GLOO, "options", "forming gloo groups again after a fault"),
    *private_names(
        _GLOO,
        "_set_sequence_number_for_group",
        "forming gloo groups again after a fault",
        until=_NUMBERED_FROM_ZERO,
    ),
    *private_names(_GLOO, "_Options create_device", "binding gloo to a network interface"),
    *private_names(
        f"{_GLOO}._Options", "_timeout _devices _threads", "binding gloo to a network interface"
    ),
    *private_names(
        _NCCL, "Options", "forming NCCL groups again after a fault", optional_owner=True
    ),
    *private_names(
        _NCCL,
        "_set_sequence_number_for_group",
        "forming NCCL groups again after a fault",
        optional_owner=True,
        until=_NUMBERED_FROM_ZERO,
    ),
    *private_names(
        f"{_NCCL}.Options",
        "_timeout",
        "forming NCCL groups again after a fault",
        optional_owner=True,
    ),
    *private_names(
        "torch._C._distributed_c10d:_SymmetricMemory",
        "empty_strided_p2p rendezvous",
        "refusing symmetric memory",
    ),
)


def replace_symmetric_memory(function: Callable[..., Any]) -> None:
    """Where every use of it begins: allocating such memory, and meeting the peers."""
    from torch._C._distributed_c10d import _SymmetricMemory

    kind: Any = _SymmetricMemory
    kind.empty_strided_p2p = kind.rendezvous = staticmethod(function)


def plugins() -> MutableMapping[str, Any]:
    """The backends that packages have registered, by their name in capitals."""
    found: MutableMapping[str, Any] = c10d.Backend._plugins
    return found


def backend_type(kind: str) -> Any:
    return c10d.Backend.backend_type_map.get(kind, dist.ProcessGroup.BackendType.CUSTOM)


def leave_out_of_flight_recorder(kind: str) -> None:
    """From torch 2.15 on a recorder is attached to every group whose backend has none of its own.

    It would ask our groups for a backend in C++, which they do not register.
    """
    recorded: set[str] | None = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if recorded is not None:
        recorded.add(kind)


def backend_options() -> Any:
    """Empty options for a plugin's creator function."""
    options: Any = c10d._DistributedBackendOptions  # type: ignore[attr-defined]
    return options()


def start_sequence(backend: Any) -> None:
    """Let the backend number its collectives, as torch did up to 2.13 when it created one."""
    if minor(torch.__version__) < _NUMBERED_FROM_ZERO:
        backend._set_sequence_number_for_group()


def gloo_options(timeout: timedelta, interface: str) -> Any:
    """Options of a gloo group that is bound to this network interface."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(interface=interface)]
    options._threads = 2
    return options


def nccl_options(timeout: timedelta) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
