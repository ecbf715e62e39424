"""Operations that a library is to take as one: NCCL groups them, and sends need not wait for each
other.

`dist.batch_isend_irecv` asks the library for that only in groups of torch's own type, and does one
operation after the other in all others. Two ranks that send to each other would then both wait for
the other to receive. So for our groups its work is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.torch.groups.solo_results import flat
from taskd.torch.setup_results import WITHOUT_RESULT

OURS = "_taskd"
"""Marks the function that we have put there."""


@dataclass(slots=True)
class Joint:
    """Between the beginning and the end of them."""

    inner: dist.ProcessGroup | None
    """Where it was begun, and must be ended whatever comes; None: nowhere."""
    device: torch.device
    outputs: list[torch.Tensor] = field(default_factory=list)
    """What they have to fill."""

    def add(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in WITHOUT_RESULT:
            self.outputs += flat(args[0])


def teach_batches(is_ours: Callable[[Any], bool]) -> None:
    """From now on `dist.batch_isend_irecv` works in our groups as in torch's own."""
    natively = c10d.batch_isend_irecv
    if hasattr(natively, OURS):
        return

    @wraps(natively)
    def batch_isend_irecv(p2p_op_list: Sequence[Any]) -> list[Any]:
        first = p2p_op_list[0] if p2p_op_list else None
        if not isinstance(first, dist.P2POp):
            return natively(p2p_op_list)  # type: ignore[arg-type]  # says what is wrong with it
        group: Any = c10d._get_default_group() if first.group is None else first.group
        device = first.tensor.device
        if not is_ours(group) or not group._get_backend(device).supports_coalescing:
            return natively(p2p_op_list)  # type: ignore[arg-type]
        c10d._check_p2p_op_list(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as together:
            for one in p2p_op_list:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=one.group, tag=one.tag, **peer)
        works: list[Any] = together.works
        return works

    setattr(batch_isend_irecv, OURS, True)
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv
