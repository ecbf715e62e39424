"""An abandoned step leaves no trace: what has to be saved at its beginning, as cheaply as possible.

The gates (`step_cycle.py`) let no optimizer change the weights before the update, so weights and
optimizer state need no copy. The rest of what a forward and a backward pass change is small, except
the gradients, which belong to the step and are dropped with it.

Some scripts change weights by themselves in a pass: the moving average of an encoder that has no
optimizer, a target network. Samples show it, and from then on these weights are saved, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from taskd.torch import compat
from taskd.torch.state import host_memory, pieces
from taskd.torch.state.protected import Protected
from taskd.torch.state.sharded import is_distributed, local

log = logging.getLogger(__name__)

WATCHED, ELEMENTS = 16, 16
"""How many weights are watched, and how many elements of each."""


@dataclass(slots=True)
class _Sample:
    """Some bytes of the weights."""

    on_host: list[bytes] = field(default_factory=list)
    on_device: list[torch.Tensor] = field(default_factory=list)


class Undo:
    """The small state as it was when the current step began."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] | None = None
        self._scalers: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._parts: dict[str, Any] = {}
        optimized = dict.fromkeys(parameter for _, parameter in pieces.optimized(protected))
        others = [one for one in protected.parameters if one not in optimized]
        self._watched = [_Watched(weights) for weights in (others, [*optimized]) if weights]

    def save(self, with_gradients: bool) -> None:
        """Called when a step begins. `with_gradients`: the last step has not used them up."""
        protected = self._protected
        buffers = protected.buffers()
        if len(buffers) != len(self._copies):
            self._copies = [torch.empty_like(buffer) for buffer in buffers]
        self._buffers = buffers
        if buffers:
            with torch.no_grad():
                compat.copy_all(self._copies, buffers)
        self._gradients = None
        if with_gradients:
            self._gradients = [
                None if p.grad is None else p.grad.detach().clone() for p in protected.parameters
            ]
        self._scalers = []
        for scaler in protected.scalers:
            scale, growth = compat.scaler_state(scaler)
            self._scalers.append((_copy(scale), _copy(growth)))
        self._parts = protected.copy_parts()
        for weights in self._watched:
            weights.save()

    def notice_changes(self) -> None:
        """Before the first update of a step: weights that have changed are saved from now on."""
        for weights in self._watched:
            weights.notice_changes()

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
    def restore(self, is_updated: bool = False) -> bool:
        """Bring back what `save` has saved. False: weights have changed that were not saved.

        `is_updated`: an optimizer has changed them, which is not undone.
        """
        protected = self._protected
        self._put_buffers(self._buffers, self._copies)
        for index, parameter in enumerate(protected.parameters):
            parameter.grad = None if self._gradients is None else self._gradients[index]
        for scaler, (scale, growth) in zip(protected.scalers, self._scalers, strict=True):
            compat.set_scaler_state(scaler, _copy(scale), _copy(growth))
            compat.forget_scaler_step(scaler)
        for name, part in protected.parts.items():
            part.load_state_dict(self._parts[name])
        if is_updated:
            return True
        return all([weights.restore() for weights in self._watched])

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """What a forward and a backward pass read is as it was when the step began, without
        gradients; on exit everything is as it is now."""
        protected = self._protected
        gradients = [parameter.grad for parameter in protected.parameters]
        buffers = protected.buffers()
        copies = [buffer.detach().clone() for buffer in buffers]
        scalers = [compat.scaler_state(scaler) for scaler in protected.scalers]
        try:
            self._put_buffers(self._buffers, self._copies)
            for parameter in protected.parameters:
                parameter.grad = None
            for scaler, (scale, growth) in zip(protected.scalers, self._scalers, strict=True):
                compat.set_scaler_state(scaler, _copy(scale), _copy(growth))
            yield
        finally:
            self._put_buffers(buffers, copies)
            for parameter, gradient in zip(protected.parameters, gradients, strict=True):
                parameter.grad = gradient
            for scaler, (scale, growth) in zip(protected.scalers, scalers, strict=True):
                compat.set_scaler_state(scaler, scale, growth)

    @torch.no_grad()
    def _put_buffers(self, buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._protected.put_buffers(buffers)
        if buffers:
            compat.copy_all(buffers, values)


class _Watched:
    """Weights that the script should not change by itself, and may."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self._weights = weights
        self._chosen = weights[:: len(weights) // WATCHED + 1]
        self._are_plain = not any(map(is_distributed, self._chosen))
        self._arrays: list[np.ndarray[Any, Any]] = []
        """Those on the host."""
        self._views: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        """The others."""
        self._places: list[int] = []
        self._sample = _Sample()
        self._are_saved = False
        self._copies: list[torch.Tensor] = []

    def save(self) -> None:
        self._sample = self._read()
        if self._are_saved:
            with torch.no_grad():
                self._copy()

    def _copy(self) -> None:
        now = [local(one) for one in self._weights]
        if len(self._copies) != len(now):
            self._copies = [torch.empty_like(one) for one in now]
        compat.copy_all(self._copies, now)

    def notice_changes(self) -> None:
        if not self._are_saved and self._have_changed():
            self._are_saved = True
            log.info("weights change in a step before the update: they are copied in each step")

    def restore(self) -> bool:
        if self._copies:
            compat.copy_all([local(one) for one in self._weights], self._copies)
        elif self._have_changed():
            self._are_saved = True
            return False
        return True

    def _have_changed(self) -> bool:
        before, now = self._sample, self._read()
        return before.on_host != now.on_host or any(
            not torch.equal(*both) for both in zip(before.on_device, now.on_device, strict=True)
        )

    def _read(self) -> _Sample:
        """The bytes of a few elements of a few of the weights."""
        owns: Sequence[torch.Tensor] = self._chosen
        if not self._are_plain:
            owns = [local(one) for one in owns]
        places = [one.data_ptr() for one in owns]
        if places != self._places:
            self._places, self._arrays, self._views = places, [], {}
            for one in map(torch.Tensor.detach, owns):
                few = few_of(one)
                if (array := host_memory.array_of(few)) is not None:
                    self._arrays.append(array)
                else:
                    self._views.setdefault((one.device, one.dtype), []).append(few)
        return _Sample(
            [one.tobytes() for one in self._arrays],
            [torch.cat(views).view(torch.uint8) for views in self._views.values()],
        )


def few_of(tensor: torch.Tensor) -> torch.Tensor:
    """A view of some elements."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor[..., :1].reshape(-1)
    gap = max(1, flat.numel() // ELEMENTS)
    return flat[::gap][:ELEMENTS]


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.clone()
