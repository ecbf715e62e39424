"""`dist.broadcast_object_list` in the replacement of its source.

torch's function leaves the objects of the source alone: it has them already. In a replacement,
which runs the set-up alone, they can differ from those that its predecessor has sent to the other
ranks (a name with the time in it, a random seed). So there it takes part as a receiver, and gets
what the others got (`setup_results.py`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.torch import compat
from taskd.torch.groups.all_groups import Groups, Mode

ORIGINAL = "_taskd_original"
"""Where our function keeps the one of torch that it replaces."""
CALLS = ["broadcast", "broadcast"]
"""What torch's function does: it sends the sizes, and then the objects."""


def patch_broadcast_object_list(groups: Groups) -> None:
    original = getattr(c10d.broadcast_object_list, ORIGINAL, c10d.broadcast_object_list)

    @wraps(original)
    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        group_src: int | None = None,
    ) -> None:
        ours: Any = compat.default_group() if group is None else group
        source = group_src
        if source is None and ours in groups:
            source = dist.get_group_rank(ours, src or 0)
        is_source = groups.mode is Mode.SOLO and ours in groups and source == ours.rank()
        if is_source and ours.size() > 1 and groups.setup.knows(ours.getGroupName(), CALLS):
            other = (ours.rank() + 1) % ours.size()
            original(object_list, group=group, device=device, group_src=other)
        else:
            original(object_list, src, group, device, group_src)

    setattr(broadcast_object_list, ORIGINAL, original)
    dist.broadcast_object_list = c10d.broadcast_object_list = broadcast_object_list
