"""The bytes of a tensor, without a copy where it lies in one piece."""

from __future__ import annotations

import torch


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
