"""What the user asked to have protected, and how its pieces are reached.

`undo.py` remembers the small ones for a step, `state.py` moves all of them between ranks,
`dump.py` writes them to a checkpoint.
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
from taskd.torch.groups import ddp_buffers as buffers


class Stateful(Protocol):
    """Anything that can say and take back its state: schedulers, samplers, objects of the user."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Protected:
    """The pieces of one training job in this process."""

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
        self._homes = [home for model in self.models for home in buffers.homes(model)]
        _check(self)

    def buffers(self) -> list[torch.Tensor]:
        """Every buffer of every model."""
        return buffers.found(self._homes)

    def put_buffers(self, those: Iterable[torch.Tensor]) -> None:
        for (module, name), buffer in zip(self._homes, those, strict=True):
            module._buffers[name] = buffer

    def reducers(self) -> list[DistributedDataParallel]:
        return [model for model in self.models if isinstance(model, DistributedDataParallel)]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) else [value]


def _check(kept: Protected) -> None:
    problems = [
        f"protect({name}=…) needs state_dict and load_state_dict, {type(part).__name__} has not"
        for name, part in kept.parts.items()
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict"))
    ]
    if any(model.static_graph for model in kept.reducers()):
        problems.append(
            "DDP(static_graph=True) cannot be protected: "
            "a rank that joins later would not know the graph that the others have recorded"
        )
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if zero and any(isinstance(one, zero.ZeroRedundancyOptimizer) for one in kept.optimizers):
        problems.append(
            "ZeroRedundancyOptimizer cannot be protected: each rank holds another part of its "
            "state, and nobody could give it to a replacement; use fully_shard"
        )
    known = set(kept.parameters)
    for optimizer in kept.optimizers:
        for group in optimizer.param_groups:
            if not known.issuperset(group["params"]):
                problems.append("the optimizer has parameters that no protected model has")
                break
    if problems:
        raise SettingsError(problems)
