"""Buffers, tensors that change in place, and gradient scalers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from taskd.runtime.private_names import private_names

NAMES = (
    *private_names("torch.nn:Module", "_buffers", "restoring buffers after an abandoned step"),
    *private_names("torch", "_foreach_copy_", "copying buffers at the start of a step"),
    *private_names("torch:Tensor", "_version", "noticing tensors that were changed in place"),
    *private_names(
        "torch.amp:GradScaler",
        "_scale _growth_tracker _per_optimizer_states",
        "restoring a GradScaler after an abandoned step",
    ),
)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary itself: a new tensor can be put in."""
    return module._buffers


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source over its target, in one call for all of them."""
    torch._foreach_copy_(targets, sources)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with every change in place."""
    return tensor._version


def version(tensor: torch.Tensor) -> int:
    """How often it was changed in place. Always 0 where torch does not count."""
    return 0 if tensor.is_inference() else int(tensor._version)


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The same for several tensors, in a few instructions for each."""
    found = list(tensors)
    try:
        return [one._version for one in found]
    except RuntimeError:  # torch does not count the changes of some
        return list(map(version, found))


def scaler_state(scaler: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scale and growth tracker: the tensors themselves, without waiting for a device."""
    return scaler._scale, scaler._growth_tracker


def set_scaler_state(scaler: Any, scale: torch.Tensor | None, growth: torch.Tensor | None) -> None:
    scaler._scale, scaler._growth_tracker = scale, growth


def forget_scaler_step(scaler: Any) -> None:
    """A GradScaler remembers what it has found in the step that was abandoned."""
    scaler._per_optimizer_states.clear()
