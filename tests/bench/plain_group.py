"""A group of torch's own in a process that belongs to a job.

There `dist.new_group` gives a resilient group, so that what is measured as plain
would pass through our code as well.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.torch.groups.resilient_group import ORIGINAL, ResilientGroup

HELPER = "_new_process_group_helper"


def new_plain_group(backend: str = "gloo") -> dist.ProcessGroup:
    """All ranks call it together."""
    ours = getattr(c10d, HELPER)
    setattr(c10d, HELPER, getattr(ours, ORIGINAL))
    try:
        group = dist.new_group(backend=backend)
    finally:
        setattr(c10d, HELPER, ours)
    assert isinstance(group, dist.ProcessGroup)
    assert not isinstance(group, ResilientGroup)
    return group
