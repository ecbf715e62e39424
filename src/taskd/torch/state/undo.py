"""An abandoned step leaves no trace: what its beginning must remember, as cheaply as it can be.

The gate (`step.py`) lets nothing reach the weights before the update, so weights and optimizer
state need no copy. The rest of what a forward and a backward pass touch is small, except the
gradients, which belong to the step and are dropped with it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from taskd.torch.state.protected import Protected


class Undo:
    """The state of affairs when the current step began."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] | None = None
        self._groups: list[list[dict[str, Any]]] = []
        self._scalers: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._parts: dict[str, Any] = {}

    @torch.no_grad()
    def remember(self, gradients_carry: bool) -> None:
        """Called as a step begins. `gradients_carry`: the last step has not used them up."""
        kept = self._protected
        buffers = kept.buffers()
        if len(buffers) != len(self._copies):
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        if buffers:
            torch._foreach_copy_(self._copies, buffers)
        self._gradients = None
        if gradients_carry:
            self._gradients = [
                None if p.grad is None else p.grad.detach().clone() for p in kept.parameters
            ]
        self._groups = [
            [_without_parameters(group) for group in optimizer.param_groups]
            for optimizer in kept.optimizers
        ]
        self._scalers = [(_copy(one._scale), _copy(one._growth_tracker)) for one in kept.scalers]
        self._parts = {name: deepcopy(part.state_dict()) for name, part in kept.parts.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Make it as if the step had not begun."""
        kept = self._protected
        kept.put_buffers(self._buffers)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._copies)
        for index, parameter in enumerate(kept.parameters):
            parameter.grad = None if self._gradients is None else self._gradients[index]
        for optimizer, groups in zip(kept.optimizers, self._groups, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - before.keys() - {"params"}:
                    del group[name]
                group.update(before)
        for scaler, (scale, growth) in zip(kept.scalers, self._scalers, strict=True):
            scaler._scale, scaler._growth_tracker = _copy(scale), _copy(growth)
            scaler._per_optimizer_states.clear()
        for name, part in kept.parts.items():
            part.load_state_dict(self._parts[name])


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()
