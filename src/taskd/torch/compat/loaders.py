"""Data loaders that can be opened at any batch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from taskd.runtime.private_names import Find, check_torch, find_owner, private_names

NAMES = (
    *private_names(
        "torch.distributed.distributed_c10d",
        "_get_default_store",
        "ending an epoch on all ranks",
    ),
    *private_names("torch.utils.data:DataLoader", "_get_iterator", "opening a loader at any batch"),
)


def check_data(find: Find = find_owner) -> None:
    """The names that `Job.batches` needs."""
    check_torch(NAMES, find)


def iterates_as_data_loader(kind: Any) -> bool:
    """Whether a subclass of DataLoader leaves the iteration as it is."""
    from torch.utils.data import DataLoader

    return kind.__iter__ is DataLoader.__iter__ and kind._get_iterator is DataLoader._get_iterator


def default_store() -> dist.Store:
    """The store of the default group."""
    return c10d._get_default_store()
