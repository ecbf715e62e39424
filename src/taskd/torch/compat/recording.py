"""Recording the collectives and the data loading of a step."""

from __future__ import annotations

from typing import Any

import torch

from taskd.runtime.private_names import Find, check_torch, find_owner, private_names

NAMES = (
    *private_names("torch._C", "_after_autograd_keyset", "recording collectives"),
    *private_names("torch.library:Library", "_destroy", "recording collectives"),
    *private_names("torch._ops:OpOverload", "_schema", "recording collectives"),
    *private_names("torch.utils.data.dataloader", "_BaseDataLoaderIter", "recording data loading"),
)


def check_profiling(find: Find = find_owner) -> None:
    """The names that a recording needs."""
    check_torch(NAMES, find)


def below_autograd(keyset: Any) -> Any:
    """The dispatch keys that come after our own kernel."""
    return keyset & torch._C._after_autograd_keyset


def remove_kernels(library: Any) -> None:
    library._destroy()


def argument_positions(operation: Any) -> dict[str, int]:
    """Where each argument of an operator is."""
    return {argument.name: at for at, argument in enumerate(operation._schema.arguments)}


def data_loader_iterator() -> type:
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter
