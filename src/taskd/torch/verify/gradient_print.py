"""The fingerprint of the gradients that this rank computes, before they are summed over ranks.

A hook on each parameter reads its gradient when backward has computed it. Nothing else changes: DDP
sums the gradients as always. The device is waited for once, when the number is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from taskd.torch.state.fingerprints import word
from taskd.torch.state.pieces import mixed


class GradientPrint:
    """What one call has computed."""

    def __init__(self) -> None:
        self._words: dict[int, list[torch.Tensor]] = {}

    @contextmanager
    def recording(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Record the gradients that are computed inside."""
        handles = [
            parameter.register_hook(partial(self._add, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def is_empty(self) -> bool:
        return not self._words

    def value(self) -> int:
        """One number; it differs if any bit of any gradient differs."""
        words: dict[torch.device, list[torch.Tensor]] = {}
        places: list[int] = []
        for index in sorted(self._words):
            for one in self._words[index]:
                places.append(index)
                words.setdefault(one.device, []).append(one)
        values = [value for ones in words.values() for value in torch.stack(ones).tolist()]
        return mixed([*places, *values])

    def _add(self, index: int, gradient: torch.Tensor) -> None:
        parts = [gradient]
        if gradient.layout is not torch.strided:
            gradient = gradient.coalesce()
            parts = [gradient.indices(), gradient.values()]
        self._words.setdefault(index, []).extend(word(part.detach()) for part in parts)
