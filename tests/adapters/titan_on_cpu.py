"""Import it before torchtitan: its Trainer then trains on the CPU, for which it was not made.

torchtitan takes CUDA where there is no other accelerator, and asks it for its name and its memory.
It sums gradients with an operation that gloo does not have.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule

MEMORY = SimpleNamespace(total_memory=1 << 30)


def install() -> None:
    """Once per process; a standby has done it for the ranks that it becomes."""
    names: dict[str, Any] = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: MEMORY,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    for name, function in names.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    plain = FSDPModule.set_gradient_divide_factor

    def set_factor(module: FSDPModule, factor: float) -> None:
        plain(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor  # type: ignore[method-assign, assignment]


install()
