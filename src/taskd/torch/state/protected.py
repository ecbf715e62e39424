"""What the script asked to protect, and how its pieces are reached.

`undo.py` saves the small ones for a step, `transfer.py` moves all of them between ranks,
`emergency_checkpoint.py` writes them to a checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from taskd.errors import SettingsError
from taskd.torch import compat
from taskd.torch.groups import ddp_buffers


class Stateful(Protocol):
    """Anything with `state_dict` and `load_state_dict`: schedulers, samplers, your own objects."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Protected:
    """The protected objects of one training job in this process."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        scaler: torch.amp.GradScaler | Sequence[torch.amp.GradScaler] | None,
        parts: dict[str, Stateful],
    ) -> None:
        self.models: list[nn.Module] = _listed(model)
        self.optimizers: list[Optimizer] = _listed(optimizer)
        self.scalers: list[torch.amp.GradScaler] = _listed(scaler)
        self.parts = parts
        self.step: int | None = None
        """In a repair: the step whose state this is. None: of no step, or partly of another."""
        self.parameters = list(dict.fromkeys(p for m in self.models for p in m.parameters()))
        self._slots = [slot for model in self.models for slot in ddp_buffers.buffer_slots(model)]
        _check(self)

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer of every model."""
        return ddp_buffers.read_slots(self._slots)

    def put_buffers(self, buffers: Iterable[torch.Tensor]) -> None:
        for (module, name), buffer in zip(self._slots, buffers, strict=True):
            compat.buffers_of(module)[name] = buffer

    def ddp_models(self) -> list[DistributedDataParallel]:
        return [model for model in self.models if isinstance(model, DistributedDataParallel)]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _check(protected: Protected) -> None:
    problems = [
        f"protect({name}=…): {type(part).__name__} has no state_dict and load_state_dict"
        for name, part in protected.parts.items()
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict"))
    ]
    if any(model.static_graph for model in protected.ddp_models()):
        problems.append(
            "DDP(static_graph=True) cannot be protected: a rank that joins later would not know "
            "the graph that the others have recorded; leave static_graph out"
        )
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero and any(isinstance(one, zero.ZeroRedundancyOptimizer) for one in protected.optimizers):
        problems.append(
            "ZeroRedundancyOptimizer cannot be protected: each rank holds another part of its "
            "state, and no rank could give it to a replacement; use fully_shard"
        )
    known = set(protected.parameters)
    for optimizer in protected.optimizers:
        for group in optimizer.param_groups:
            if not known.issuperset(group["params"]):
                problems.append("the optimizer has parameters that no protected model has")
                break
    if problems:
        raise SettingsError(problems)
