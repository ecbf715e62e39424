"""Makes DDP's bucket layout the same in every life of every rank.

DDP rearranges its buckets after its first iteration. A rank that joins later would still have the
first layout; the sums would be cut, and rounded, differently. So one pass over zero gradients is
run on every rank before training, while its groups ask nobody: DDP then settles at once, by the
order of the parameters and nothing else, and never again.
"""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from taskd.torch.groups.all_groups import Groups, Mode


def settle(model: DistributedDataParallel, groups: Groups) -> None:
    """Let DDP rearrange its buckets now, without talking to anybody."""
    if model.find_unused_parameters:
        return  # it keeps its first layout for life
    before = groups.mode
    groups.mode = Mode.MENDING  # not alone: this is no part of the script's set-up (`setup.py`)
    try:
        model.reducer.prepare_for_backward([])
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        # The engine runs the newest node first: gradients arrive from the last parameter on, as
        # in most backward passes.
        with torch.enable_grad():
            roots = [p.view_as(p) for p in parameters]
        torch.autograd.backward(roots, _zeros(parameters))
        model.reducer._rebuild_buckets()
    finally:
        groups.mode = before
    for parameter in parameters:
        parameter.grad = None


def _zeros(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """A zero gradient for each, all in the same memory.

    On the CPU it comes from the kernel, not from malloc: a large block that malloc gets back makes
    it keep the blocks that follow, and the optimizer's state would lie between gradients.
    """
    longest: dict[tuple[torch.device, torch.dtype], int] = {}
    for one in parameters:
        kind = one.device, one.dtype
        longest[kind] = max(longest.get(kind, 1), one.numel())
    memory = {kind: _memory(*kind, length) for kind, length in longest.items()}
    return [memory[p.device, p.dtype].as_strided(p.size(), p.stride()) for p in parameters]


def _memory(device: torch.device, dtype: torch.dtype, length: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, length * dtype.itemsize), dtype=dtype)


def renew(model: Any, groups: Groups) -> None:
    """For another number of ranks: DDP's reducer remembers by how many it divides."""
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._ddp_init_helper(parameters, sparse, names, model.static_graph)
    settle(model, groups)
