"""An abandoned step leaves no trace: what has to be saved at its beginning, as cheaply as possible.

The gates (`step_cycle.py`) let nothing reach the weights before the update, so weights and
optimizer state need no copy. The rest of what a forward and a backward pass change is small, except
the gradients, which belong to the step and are dropped with it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from taskd.torch import compat
from taskd.torch.state.protected import Protected


class Undo:
    """The small state as it was when the current step began."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] | None = None
        self._groups: list[list[dict[str, Any]]] = []
        self._scalers: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._parts: dict[str, Any] = {}

    @torch.no_grad()
    def save(self, with_gradients: bool) -> None:
        """Called when a step begins. `with_gradients`: the last step has not used them up."""
        protected = self._protected
        buffers = protected.buffers()
        if len(buffers) != len(self._copies):
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        if buffers:
            compat.copy_all(self._copies, buffers)
        self._gradients = None
        if with_gradients:
            self._gradients = [
                None if p.grad is None else p.grad.detach().clone() for p in protected.parameters
            ]
        self._groups = [
            [_without_parameters(group) for group in optimizer.param_groups]
            for optimizer in protected.optimizers
        ]
        self._scalers = []
        for scaler in protected.scalers:
            scale, growth = compat.scaler_state(scaler)
            self._scalers.append((_copy(scale), _copy(growth)))
        self._parts = {name: deepcopy(part.state_dict()) for name, part in protected.parts.items()}

    def left_gradients(self) -> bool:
        """Whether the step without an update has left gradients for the next one.

        A scaler that skips the update of a step, because its gradients overflow, changes its scale.
        """
        for scaler, (scale, _) in zip(self._protected.scalers, self._scalers, strict=True):
            now, _ = compat.scaler_state(scaler)
            if now is not None and scale is not None and not torch.equal(now, scale):
                return False
        return any(parameter.grad is not None for parameter in self._protected.parameters)

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back what `save` has saved."""
        protected = self._protected
        protected.put_buffers(self._buffers)
        if self._buffers:
            compat.copy_all(self._buffers, self._copies)
        for index, parameter in enumerate(protected.parameters):
            parameter.grad = None if self._gradients is None else self._gradients[index]
        for optimizer, groups in zip(protected.optimizers, self._groups, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                for name in group.keys() - before.keys() - {"params"}:
                    del group[name]
                group.update(before)
        for scaler, (scale, growth) in zip(protected.scalers, self._scalers, strict=True):
            compat.set_scaler_state(scaler, _copy(scale), _copy(growth))
            compat.forget_scaler_step(scaler)
        for name, part in protected.parts.items():
            part.load_state_dict(self._parts[name])


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()
