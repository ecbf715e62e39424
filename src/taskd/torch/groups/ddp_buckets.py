"""Makes DDP's bucket layout the same in every incarnation of every rank.

DDP rearranges its buckets after its first iteration. A rank that joins later would still have the
first layout, and its sums would be split, and rounded, differently. So every rank runs one pass
over zero gradients before training, without communication: DDP then rearranges at once, by the
order of the parameters and nothing else, and never again.
"""

from __future__ import annotations

import mmap

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from taskd.torch import compat
from taskd.torch.groups import ddp_hook_state
from taskd.torch.groups.all_groups import Groups, Mode


def rebuild_early(model: DistributedDataParallel, groups: Groups) -> None:
    """Let DDP rearrange its buckets now, without communication."""
    if model.find_unused_parameters:
        return  # such a DDP keeps its first layout
    before = groups.mode
    groups.mode = Mode.REPAIRING  # not SOLO: this is not part of the set-up (`setup_results.py`)
    try:
        model.reducer.prepare_for_backward([])
        parameters = [p for p in model.module.parameters() if p.requires_grad]
        # The engine runs the newest node first: gradients arrive from the last parameter on, as
        # in most backward passes.
        with torch.enable_grad():
            roots = [p.view_as(p) for p in parameters]
        zeros = _zeros(parameters)
        for place in _sparse(model, parameters):
            # DDP expects a sparse gradient of these.
            with torch.enable_grad():
                first = torch.zeros(1, dtype=torch.long, device=parameters[place].device)
                roots[place] = nn.functional.embedding(first, parameters[place], sparse=True)
            zeros[place] = torch.zeros_like(roots[place])
        with ddp_hook_state.untouched(model):
            torch.autograd.backward(roots, zeros)
        compat.rebuild_buckets(model.reducer)
    finally:
        groups.mode = before
    for parameter in parameters:
        parameter.grad = None


def resize(model: DistributedDataParallel, groups: Groups) -> None:
    """The number of ranks has changed: DDP's reducer keeps the number that it divides by."""
    compat.rebuild_reducer(model)
    rebuild_early(model, groups)


def _sparse(model: DistributedDataParallel, parameters: list[nn.Parameter]) -> list[int]:
    """The places of parameters with sparse gradients."""
    tables = (
        one for one in model.module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
    )
    sparse = {id(one.weight) for one in tables if one.sparse}
    return [place for place, one in enumerate(parameters) if id(one) in sparse]


def _zeros(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """A zero gradient for each, all in the same memory.

    On the CPU it comes from the kernel, not from malloc: a large block that is returned to malloc
    makes it keep the blocks that follow, and the optimizer's state would lie between gradients.
    """
    longest: dict[tuple[torch.device, torch.dtype], int] = {}
    for one in parameters:
        kind = one.device, one.dtype
        longest[kind] = max(longest.get(kind, 1), one.numel())
    memory = {kind: _zero_memory(*kind, length) for kind, length in longest.items()}
    return [memory[p.device, p.dtype].as_strided(p.size(), p.stride()) for p in parameters]


def _zero_memory(device: torch.device, dtype: torch.dtype, length: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(length, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, length * dtype.itemsize), dtype=dtype)
