"""What we rely on in torch beyond its public surface, checked once before anything is built on it.

`group.py`, `transport.py` and `buckets.py` stand on these names. A torch that lacks one of them is
refused here with the name, not later with a riddle.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Reducer
from torch.distributed import distributed_c10d as c10d

from taskd.errors import UnknownTorch as UnknownTorch

KNOWN = (2, 13)
"""The torch that this seam was written against and is tested with."""

_GROUP = (
    "_register_backend",
    "_set_default_backend",
    "all_gather_single _allgather_base",
    "all_gather_single_coalesced allgather_into_tensor_coalesced",
    "all_to_all_single alltoall_base",
    "allgather_coalesced",
    "reduce_scatter_single _reduce_scatter_base",
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
    "recv_anysource",
    "split_group",
)
"""Where torch has renamed an operation, either name will do; our groups answer to both."""
_REDUCER = ("_rebuild_buckets", "prepare_for_backward")


def check() -> None:
    """Refuse a torch whose inside is not the one we know."""
    if not dist.is_available():
        raise UnknownTorch(f"torch {torch.__version__} was built without torch.distributed")
    missing = [
        f"ProcessGroup.{names.split()[0]}"
        for names in _GROUP
        if not any(hasattr(dist.ProcessGroup, name) for name in names.split())
    ]
    missing += [f"Reducer.{name}" for name in _REDUCER if not hasattr(Reducer, name)]
    if not hasattr(dist, "ProcessGroupGloo"):
        missing.append("ProcessGroupGloo")
    if not hasattr(c10d.Backend, "register_backend"):
        missing.append("Backend.register_backend")
    if missing:
        known = ".".join(map(str, KNOWN))
        raise UnknownTorch(
            f"torch {torch.__version__} lacks {', '.join(missing)}; "
            f"in-process recovery is written for torch {known}"
        )
