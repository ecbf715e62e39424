"""Operations that a library runs as one: NCCL groups them, and sends need not wait for each other.

`dist.batch_isend_irecv` asks the library for that only in groups of torch's own type, and runs one
operation after the other in all others. Two ranks that send to each other would then both wait for
the other to receive. So its work is done here for our groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.torch import compat
from taskd.torch.groups.solo_results import flatten
from taskd.torch.startup.setup_results import WITHOUT_RESULT

PATCHED = "_taskd"
"""Marks our own function."""


@dataclass(slots=True)
class CoalescedBlock:
    """The operations between the start and the end of one coalesced block."""

    inner: dist.ProcessGroup | None
    """Where the block was started, and must be ended in any case; None: nowhere."""
    device: torch.device
    outputs: list[torch.Tensor] = field(default_factory=list)

    def add(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in WITHOUT_RESULT:
            self.outputs += flatten(args[0])


def patch_batch_isend_irecv(is_ours: Callable[[Any], bool]) -> None:
    """Make `dist.batch_isend_irecv` work in our groups as in torch's own."""
    original = c10d.batch_isend_irecv
    if hasattr(original, PATCHED):
        return

    @wraps(original)
    def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
        first = p2p_op_list[0] if p2p_op_list else None
        if not isinstance(first, dist.P2POp):
            return original(p2p_op_list)  # type: ignore[arg-type]  # it reports the wrong argument
        group: Any = compat.default_group() if first.group is None else first.group
        device = first.tensor.device
        if not is_ours(group) or not compat.backend_of(group, device).supports_coalescing:
            return original(p2p_op_list)  # type: ignore[arg-type]
        compat.check_p2p_ops(p2p_op_list)
        with compat.coalescing_manager(group, device) as block:
            for one in p2p_op_list:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=one.group, tag=one.tag, **peer)
        works: list[Any] = block.works
        return works

    setattr(batch_isend_irecv, PATCHED, True)
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
